// What was made, newest first: a grid that one Tab enters and arrow keys walk.

import { byId, el } from "./dom.js";
import * as store from "./store.js";

export class Gallery {
  constructor(open) {
    this.open = open;
    this.works = [];
    this.list = byId("gallery");
    this.list.addEventListener("keydown", (event) => this.key(event));
  }

  async load() {
    try {
      this.works = await store.all();
    } catch {
      this.problem = "This browser keeps nothing: the gallery ends with the page.";
    }
    this.paint();
  }

  async add(work) {
    this.works.unshift(work);
    try {
      const gone = await store.keep(work);
      this.works = this.works.filter(({ id }) => !gone.includes(id));
    } catch {
      this.problem = "The browser has no room for more: new works end with the page.";
    }
    this.paint();
  }

  async remove(work) {
    const index = this.works.indexOf(work);
    this.works.splice(index, 1);
    await store.remove([work.id]).catch(() => {});
    this.paint();
    return index;
  }

  async clear() {
    this.works = [];
    await store.clear().catch(() => {});
    this.paint();
  }

  next(work, by) {
    return this.works[this.works.indexOf(work) + by];
  }

  paint() {
    const current = this.list.querySelector("[tabindex='0']")?.dataset.id;
    const known = new Map([...this.list.children].map((item) => [item.dataset.id, item]));
    const items = this.works.map((work) => known.get(work.id) || this.item(work));
    for (const [id, item] of known) if (!this.works.some((work) => work.id === id)) this.forget(item);
    this.list.replaceChildren(...items);
    const entry = items.find((item) => item.dataset.id === current) || items[0];
    for (const item of items) item.tabIndex = item === entry ? 0 : -1;
    const count = this.works.length;
    byId("gallery-count").textContent = this.problem || (count ? `${count} ${count === 1 ? "work" : "works"}, in this browser` : "");
    byId("clear").hidden = !count;
    byId("empty").hidden = count > 0;
  }

  forget(item) {
    const image = item.querySelector("img");
    if (image) URL.revokeObjectURL(image.src);
  }

  item(work) {
    const picture = work.thumb
      ? el("img", { src: URL.createObjectURL(work.thumb), alt: "", loading: "lazy", decoding: "async", draggable: false })
      : el("span", { className: "no-thumb" }, work.kind);
    const item = el("li", {
      role: "option", className: "work", tabIndex: -1, "data-id": work.id, "aria-selected": "false",
      "aria-label": `${work.prompt || "no prompt"}, seed ${work.seed ?? "unknown"}`, title: work.prompt,
      onclick: () => {
        this.enter(item);
        this.open(work);
      },
    }, picture, work.kind === "video" ? el("span", { className: "badge", "aria-hidden": "true" }, "▶") : null,
    el("span", { className: "caption", "aria-hidden": "true" }, el("span", { className: "caption-text" }, work.prompt),
      el("span", { className: "caption-seed" }, String(work.seed ?? ""))));
    return item;
  }

  /** Make an item the one that Tab comes to, and go there. */
  enter(item) {
    for (const other of this.list.children) {
      other.tabIndex = other === item ? 0 : -1;
      other.setAttribute("aria-selected", String(other === item));
    }
    item.focus();
  }

  focus(index) {
    const item = this.list.children[Math.min(index, this.list.children.length - 1)];
    if (item) this.enter(item);
    else byId("fields").querySelector("textarea")?.focus();
  }

  key(event) {
    const items = [...this.list.children];
    const at = items.indexOf(event.target.closest("li"));
    if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const columns = items.filter((item) => item.offsetTop === items[0].offsetTop).length;
    const to = {
      ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + columns, ArrowUp: at - columns, Home: 0, End: items.length - 1,
    }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      if (items[to]) this.enter(items[to]);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.open(this.works[at]);
    } else if (event.key === "Delete") {
      event.preventDefault();
      this.remove(this.works[at]).then((index) => this.focus(index));
    }
  }
}
