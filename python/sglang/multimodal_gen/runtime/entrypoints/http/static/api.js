// Talking to this server: requests, its errors, its API key, server-sent events.
// All addresses are relative to the page, so that a prefix of a reverse proxy is kept.

const KEY = "sglang-api-key";

/** An error as the server words it; `status` 0 means that it could not be reached. */
export class ApiError extends Error {
  constructor(status, error = {}, retryAfter = null) {
    super(error.message || `The server answered ${status}.`);
    this.status = status;
    this.param = error.param || null;
    this.code = error.code || null;
    this.retryAfter = retryAfter;
  }
}

let askForKey = null; // set by the page: async (wrong) => boolean

/** Let the page ask its reader for a key when the server answers 401. */
export function onKeyWanted(ask) {
  askForKey = ask;
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** JSON text to values. Seeds may be larger than a JavaScript number holds: those come as text. */
export function parse(text) {
  return JSON.parse(text.replace(/"seed":\s*(\d{16,})/g, '"seed":"$1"'));
}

/** The other way: a seed that is text goes out as the number that it spells. */
export function unparse(value) {
  return JSON.stringify(value).replace(/"seed":"(-?\d+)"/g, '"seed":$1');
}

/** A response that is no error. Options: method, json, form, signal, headers. */
export async function request(path, options = {}) {
  for (let attempt = 0; ; attempt += 1) {
    const response = await send(path, options);
    if (response.ok) return response;
    if (response.status === 401 && askForKey && attempt < 5) {
      if (await askForKey(apiKey.get() !== null)) continue;
    }
    throw await errorOf(response);
  }
}

async function send(path, { method = "GET", json, form, signal, headers = {} }) {
  const all = { ...headers };
  const key = apiKey.get();
  if (key) all.authorization = `Bearer ${key}`;
  if (json !== undefined) all["content-type"] = "application/json";
  const body = json !== undefined ? unparse(json) : form;
  try {
    return await fetch(path, { method, headers: all, body, signal, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server cannot be reached.", code: "unreachable" });
  }
}

async function errorOf(response) {
  const after = Number(response.headers.get("retry-after")) || null;
  let body = {};
  try {
    body = await response.json();
  } catch {
    body = {}; // a proxy's own page
  }
  return new ApiError(response.status, body.error, after);
}

export async function getJson(path, options = {}) {
  return parse(await (await request(path, options)).text());
}

/** The events of a stream: {event, data, id}, `data` parsed. Comments are left out. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      const blocks = text.split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const event = eventOf(block);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function eventOf(block) {
  const event = { event: "message", data: "", id: null };
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon === 0) continue;
    const name = line.slice(0, colon);
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") event.data += value;
    else if (name === "event") event.event = value;
    else if (name === "id") event.id = value;
  }
  return event.data ? { ...event, data: parse(event.data) } : null;
}

const FINAL = new Set(["completed", "failed", "cancelled", "expired"]);

/** The states of a job until it has ended; comes back after a broken connection where it was. */
export async function* jobStates(id, signal) {
  let heard = null;
  for (let failures = 0; failures < 30; ) {
    try {
      const headers = heard ? { "last-event-id": heard } : {};
      const response = await request(`v1/jobs/${encodeURIComponent(id)}/events`, { signal, headers });
      if (response.status === 204) return;
      for await (const event of events(response)) {
        failures = 0;
        if (event.event === "error") throw new ApiError(404, event.data.error);
        heard = event.id;
        yield event.data;
        if (FINAL.has(event.data.status)) return;
      }
    } catch (error) {
      if (signal.aborted || (error instanceof ApiError && ![0, 502, 503, 504].includes(error.status))) throw error;
    }
    failures += 1;
    await new Promise((resolve) => setTimeout(resolve, Math.min(5000, 250 * failures)));
    if (signal.aborted) return;
  }
  throw new ApiError(0, { message: "The connection to the server was lost." });
}
