// One request on its way: sent, heard, cancelled, and its outcome as works for the gallery.
// A run tells its view what changes by calling `changed`; it knows nothing of the page.

import { ApiError, events, getJson, jobStates, request, unparse } from "./api.js";
import { FILES } from "./form.js";
import * as store from "./store.js";
import { thumbnail } from "./thumbnail.js";

const PREVIEWS = 3;

/** Settings without what cannot be kept as JSON. */
export const plain = (values) => Object.fromEntries(Object.entries(values).filter(([name]) => !FILES.includes(name)));

export class Run {
  /** `values` are the form's; `changed` is called whenever there is something new to show. */
  constructor(card, values, changed) {
    this.card = card;
    this.values = values;
    this.changed = changed;
    this.state = "waiting"; // waiting, sent, queued, running, done, failed, cancelled
    this.progress = 0;
    this.pictures = []; // object URLs by picture: previews, then the pictures
    this.count = values.n || 1;
    this.created = Date.now();
    this.jobId = null;
    this.error = null;
    this.works = [];
    this.aborting = new AbortController();
  }

  get over() {
    return ["done", "failed", "cancelled"].includes(this.state);
  }

  /** Go from start to end; never throws. */
  async go() {
    try {
      this.to("sent");
      await this.work();
      if (!this.over) this.to("done");
    } catch (error) {
      if (this.over) return;
      if (error.code === "cancelled" || error.name === "AbortError") return void this.to("cancelled");
      this.error = error;
      this.to("failed");
    } finally {
      this.aborting.abort();
    }
  }

  /** Stop it here and on the server. */
  async cancel() {
    if (this.over) return;
    this.to("cancelled");
    const id = this.jobId;
    if (id) await this.stop(id);
    this.aborting.abort();
  }

  async stop(id) {
    await request(`v1/jobs/${encodeURIComponent(id)}/cancel`, { method: "POST" }).catch(() => {});
  }

  to(state) {
    if (this.over) return;
    this.state = state;
    this.changed(this);
  }

  /** A job's state, as /v1/jobs tells it. */
  heard(job) {
    this.progress = Math.max(this.progress, job.progress);
    if (job.status === "queued") this.to("queued");
    else if (job.status === "in_progress") this.to("running");
  }

  show(index, blob) {
    if (this.pictures[index]) URL.revokeObjectURL(this.pictures[index]);
    this.pictures[index] = URL.createObjectURL(blob);
    this.changed(this);
  }

  async made(index, blob, facts) {
    if (this.over) return;
    const work = {
      id: `${this.jobId}-${index}`, created: Date.now() + index / 1000, model: this.card.id, prompt: this.values.prompt || "", blob,
      settings: { ...plain(this.values), n: 1, seed: facts.seed === undefined ? undefined : String(facts.seed) },
      took: (Date.now() - this.created) / 1000, ...facts, thumb: await (facts.thumb || thumbnail(blob)),
    };
    this.works.push(work);
    this.show(index, blob);
  }

  body() {
    const { image, mask, video, ...values } = this.values;
    return { body: { ...values, model: this.card.id }, image, mask, video };
  }
}

/** Pictures, by the streaming API; how far they are comes from the job's events. */
export class ImageRun extends Run {
  async work() {
    const { body, image, mask } = this.body();
    const all = { ...body, stream: true, partial_images: PREVIEWS };
    const { signal } = this.aborting;
    const response = image
      ? await request("v1/images/edits", { method: "POST", form: multipart(all, { image, mask }), signal })
      : await request("v1/images/generations", { method: "POST", json: all, signal });
    this.jobId = response.headers.get("x-job-id");
    this.watch();
    for await (const { event, data } of events(response)) {
      if (event === "error") throw new ApiError(500, data.error);
      const index = data.image_index || 0;
      const blob = fromBase64(data.b64_json, `image/${data.output_format}`);
      if (event.endsWith(".partial_image")) {
        this.show(index, blob);
      } else if (event.endsWith(".completed")) {
        await this.made(index, blob, { kind: "image", seed: data.seed, size: data.size, format: data.output_format, warnings: data.warnings });
      }
    }
    if (!this.over && this.works.length < this.count) throw new ApiError(0, { message: "The connection broke before the picture was there." });
  }

  async watch() {
    try {
      for await (const job of jobStates(this.jobId, this.aborting.signal)) this.heard(job);
    } catch {
      // The pictures come without it; only the bar stands still.
    }
  }
}

/** A video: a job that goes on without this page, and that a reload finds again. */
export class VideoRun extends Run {
  /** Go on with a job that an earlier visit began. */
  static resumed(card, kept, changed) {
    const run = new VideoRun(card, kept.values, changed);
    run.jobId = kept.id;
    run.created = kept.created;
    return run;
  }

  async work() {
    if (!this.jobId) await this.begin();
    if (this.over) return;
    const id = encodeURIComponent(this.jobId);
    let job = null;
    try {
      for await (job of jobStates(this.jobId, this.aborting.signal)) this.heard(job);
      if (job?.status === "failed") throw new ApiError(500, job.error || {});
      if (job?.status === "cancelled") return void this.to("cancelled");
      if (job?.status !== "completed") throw new ApiError(404, { message: "The video's record has expired." });
      for (const [index, { seed, width, height }] of job.results.entries()) {
        const content = (more = "") => request(`v1/videos/${id}/content?index=${index}${more}`).then((response) => response.blob());
        const blob = await content();
        const thumb = content("&variant=thumbnail").catch(() => null); // the first frame, which a browser may draw as nothing
        const kind = blob.type.startsWith("video/") ? "video" : "image"; // GIF and WebP move by themselves
        await this.made(index, blob, { kind, seed, thumb, size: `${width}x${height}`, format: formatOf(blob), warnings: job.warnings });
      }
    } finally {
      if (this.over || !this.aborting.signal.aborted) await store.jobs.remove(this.jobId);
    }
  }

  /** Send it. A cancel does not break this off: the server may have it already, and stops it by its id alone. */
  async begin() {
    const { body, image, video } = this.body();
    const begun = image || video
      ? await getJson("v1/videos", { method: "POST", form: multipart(body, { input_reference: image, video }) })
      : await getJson("v1/videos", { method: "POST", json: body });
    this.jobId = begun.id;
    if (this.over) await this.stop(begun.id);
    else await store.jobs.keep({ id: begun.id, model: this.card.id, values: plain(this.values), created: this.created });
  }

  async cancel() {
    const id = this.jobId;
    await super.cancel();
    if (id) await store.jobs.remove(id);
  }
}

function multipart(values, files) {
  const form = new FormData();
  for (const [name, value] of Object.entries(values)) {
    if (name === "lora") for (const each of value) form.append("lora[]", `${each.name}=${each.weight}`);
    else form.append(name, typeof value === "object" ? unparse(value) : String(value));
  }
  for (const [name, given] of Object.entries(files)) for (const file of given || []) form.append(name, file, file.name);
  return form;
}

function fromBase64(text, type) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Blob([bytes], { type });
}

const formatOf = (blob) => blob.type.split("/")[1]?.split(";")[0] || "mp4";
