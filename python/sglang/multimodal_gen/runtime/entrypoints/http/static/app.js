// The page: connects the form, the runs, the gallery and the viewer.

import { ApiError, apiKey, getJson, onKeyWanted } from "./api.js";
import { announce, byId, el, showError } from "./dom.js";
import { FILES, Form } from "./form.js";
import { Gallery } from "./gallery.js";
import { ImageRun, VideoRun } from "./run.js";
import { RunView } from "./runview.js";
import * as store from "./store.js";
import { Viewer } from "./viewer.js";

const AT_ONCE = 2; // a browser has six connections to a server, and a run takes two
const IDEAS = ["a red circle above a blue square", "a large yellow star on a blue background", "two small green triangles"];

let form = null;
const runs = []; // {run, view}, newest first
const gallery = new Gallery((work) => viewer.open(work));
const viewer = new Viewer({
  reuse: (work) => reuse(work.settings),
  useSeed: (work) => reuse({ seed: String(work.seed), n: 1 }, { onlyThese: true }),
  remove: (work) => gallery.remove(work),
  next: (work, by) => gallery.next(work, by),
  closed: (work) => gallery.focus(Math.max(0, gallery.works.indexOf(work))),
});

// The model.

function served(state, text) {
  byId("state-dot").dataset.state = state;
  byId("served").textContent = text;
}

async function connect() {
  for (;;) {
    try {
      const [card] = (await getJson("v1/models")).data;
      const loras = await getJson("v1/loras").catch(() => ({ data: [] }));
      return { card, adapters: loras.data.map((each) => each.name) };
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      served(error.status === 503 ? "loading" : "down", error.status === 503 ? "The model is loading…" : error.message);
      if (error.status === 401) byId("key-button").hidden = false;
    }
    await new Promise((resolve) => setTimeout(resolve, 1500));
  }
}

async function begin() {
  const { card, adapters } = await connect();
  form = new Form(card, adapters);
  served("ready", card.id);
  byId("served").title = `${card.pipeline_name}, ${card.precision}`;
  byId("key-button").hidden = !apiKey.get();
  byId("run").disabled = false;
  for (const kept of await store.jobs.all().catch(() => [])) {
    if (kept.model === card.id) put((changed) => VideoRun.resumed(card, kept, changed));
  }
  document.documentElement.dataset.ready = "yes";
}

// Runs.

function submit() {
  if (!form) return;
  form.clearFaults();
  let values;
  try {
    values = form.values();
  } catch (error) {
    if (error.param === undefined) throw error;
    form.fault(error);
    return;
  }
  const Kind = form.makesVideo ? VideoRun : ImageRun;
  put((changed) => new Kind(form.card, values, changed));
  if (matchMedia("(max-width: 760px)").matches) byId("results").scrollIntoView({ behavior: "smooth" });
}

function put(make) {
  for (const { run, view } of [...runs]) if (run.over && run.state !== "failed") dismiss(view);
  const view = new RunView({ open: (work) => viewer.open(work), retry, dismiss });
  const run = make((changed) => view.show(changed));
  runs.unshift({ run, view });
  byId("runs").prepend(view.node);
  view.show(run);
  advance();
}

function advance() {
  const busy = runs.filter(({ run }) => !run.over && run.state !== "waiting").length;
  const waiting = runs.filter(({ run }) => run.state === "waiting").reverse();
  for (const { run, view } of waiting.slice(0, Math.max(0, AT_ONCE - busy))) {
    run.go().then(() => ended(run, view));
  }
}

async function ended(run, view) {
  for (const work of run.works) await gallery.add(work);
  if (run.error instanceof ApiError && run.error.status === 400) {
    form.fault(run.error);
    dismiss(view); // said by its field
  }
  advance();
}

function retry(run, view) {
  dismiss(view);
  put((changed) => new run.constructor(run.card, run.values, changed));
}

function dismiss(view) {
  const at = runs.findIndex((each) => each.view === view);
  if (at < 0) return;
  const [{ run }] = runs.splice(at, 1);
  view.node.remove();
  run.pictures.forEach((url) => URL.revokeObjectURL(url));
}

function cancelNewest() {
  const entry = runs.find(({ run }) => !run.over);
  entry?.run.cancel();
  advance();
}

function reuse(settings, { onlyThese = false } = {}) {
  if (!form) return;
  if (onlyThese) form.set(settings);
  else form.reuse(settings);
  announce("Settings taken over");
  form.fields.get("prompt").focus();
  byId("form").scrollIntoView({ block: "start" });
}

// The key.

let asking = null; // one question at a time, whoever asks

function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    showError(byId("key-error"), wrong ? "The server does not take this key." : "");
    byId("key").value = "";
    const answer = (given) => {
      asking = null;
      if (dialog.open) dialog.close();
      byId("key-button").hidden = false;
      resolve(given);
    };
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      apiKey.set(byId("key").value.trim());
      answer(true);
    };
    byId("key-forget").onclick = () => answer(false);
    dialog.oncancel = () => answer(false);
    dialog.showModal();
  });
  return asking;
}

// Colours.

const THEMES = ["auto", "light", "dark"];

function paintTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const name = theme[0].toUpperCase() + theme.slice(1);
  byId("theme").textContent = `◐ ${name}`;
  byId("theme").setAttribute("aria-label", `Colours: ${theme === "auto" ? "as the system" : theme}`);
}

function nextTheme() {
  const now = document.documentElement.dataset.theme;
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  localStorage.setItem("sglang-theme", next);
  paintTheme(next);
}

// What the reader does.

function onKey(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    submit();
  } else if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    cancelNewest();
  }
}

function onPaste(event) {
  const field = form?.fields.get("image");
  if (field && !field.node.hidden && event.clipboardData.files.length) field.add(event.clipboardData.files);
}

async function clearAll() {
  const dialog = byId("sure");
  byId("sure-text").textContent = `${gallery.works.length} works in this browser. This cannot be undone.`;
  byId("sure-yes").onclick = () => {
    gallery.clear();
    dialog.close();
  };
  byId("sure-no").onclick = () => dialog.close();
  dialog.showModal();
}

function ideas() {
  byId("ideas").replaceChildren(...IDEAS.map((text) =>
    el("button", { type: "button", className: "idea", onclick: () => reuse({ prompt: text }, { onlyThese: true }) }, text)));
}

paintTheme(THEMES.includes(localStorage.getItem("sglang-theme")) ? localStorage.getItem("sglang-theme") : "auto");
ideas();
onKeyWanted(askForKey);
byId("theme").onclick = nextTheme;
byId("clear").onclick = clearAll;
byId("reset").onclick = () => form?.reset({ keep: ["prompt", ...FILES] });
byId("key-button").onclick = () => askForKey(false);
byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", onKey);
document.addEventListener("paste", onPaste);
gallery.load();
begin();
