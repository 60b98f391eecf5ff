// Pictures that go in: chosen, dropped or pasted; shown small, in order, each with a way out.

import { el } from "./dom.js";
import { FieldFault, labelled } from "./fields.js";

export function uploadField(name, text, { most = 1, maxBytes = Infinity, accept = "image/*", required = () => false } = {}) {
  let files = [];
  const input = el("input", { type: "file", accept, multiple: most > 1, className: "unseen" });
  const list = el("ul", { className: "uploads" });
  const drop = el("div", { className: "drop" }, input, list,
    el("button", { type: "button", className: "drop-button", onclick: () => input.click() },
      most > 1 ? "Choose, drop or paste pictures" : "Choose, drop or paste"));
  const field = labelled(name, text, drop, { wide: true, input });

  const changed = () => drop.dispatchEvent(new Event("change", { bubbles: true }));

  function add(more) {
    const pictures = [...more].filter((file) => file.type.startsWith(accept.split("/")[0]));
    const large = pictures.find((file) => file.size > maxBytes);
    field.fault(large ? `${large.name} is larger than the server takes (${Math.floor(maxBytes / 2 ** 20)} MiB).` : "");
    files = [...files, ...pictures.filter((file) => file.size <= maxBytes)].slice(-most);
    paint();
    changed();
  }

  function paint() {
    for (const image of list.querySelectorAll("img")) URL.revokeObjectURL(image.src);
    list.replaceChildren(...files.map((file, index) => {
      const thumb = file.type.startsWith("image/")
        ? el("img", { src: URL.createObjectURL(file), alt: file.name })
        : el("span", { className: "file-name" }, file.name);
      const gone = el("button", {
        type: "button", className: "icon", "aria-label": `Remove ${file.name}`,
        onclick: () => {
          files.splice(index, 1);
          paint();
          changed();
          input.focus();
        },
      }, "✕");
      return el("li", {}, thumb, gone);
    }));
  }

  input.addEventListener("change", () => {
    add(input.files);
    input.value = "";
  });
  drop.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    add(event.dataTransfer.files);
  });
  return {
    name,
    ...field,
    add,
    get: () => {
      if (required() && !files.length) throw new FieldFault(name, "this task needs a picture");
      return files.length ? [...files] : undefined;
    },
    set: (value) => {
      files = [...(value || [])];
      paint();
    },
  };
}
