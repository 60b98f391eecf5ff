// Width and height: shapes to choose from, at the pixels of the model's default size, or numbers.

import { el } from "./dom.js";
import { labelled } from "./fields.js";

const SHAPES = [["1:1", 1, 1], ["4:3", 4, 3], ["3:4", 3, 4], ["16:9", 16, 9], ["9:16", 9, 16]];

const toMultiple = (value, multiple) => Math.max(multiple, Math.round(value / multiple) * multiple);

/** The size of a shape that has about as many pixels as the default. */
export function sizeOf(across, down, [width, height], multiple) {
  const unit = Math.sqrt((width * height) / (across * down));
  return [toMultiple(unit * across, multiple), toMultiple(unit * down, multiple)];
}

export function sizeField(card) {
  const multiple = card.size_multiple || 1;
  const [width, height] = (card.size || "").split("x").map(Number);
  const known = Boolean(width && height);
  const number = (name) => el("input", {
    type: "number", name, min: multiple, step: multiple, inputmode: "numeric", autocomplete: "off",
    placeholder: "auto", "aria-label": name === "width" ? "Width in pixels" : "Height in pixels",
  });
  const [across, down] = [number("width"), number("height")];
  const swap = el("button", {
    type: "button", className: "quiet icon", title: "Swap width and height", "aria-label": "Swap width and height",
    onclick: () => set(down.value, across.value),
  }, "⇄");
  const shapes = known ? SHAPES.map((shape) => shapeButton(shape)) : [];
  const box = el("div", { className: "size" },
    shapes.length ? el("div", { className: "shapes", role: "group", "aria-label": "Shapes" }, shapes) : null,
    el("div", { className: "joined" }, across, el("span", { className: "times", "aria-hidden": "true" }, "×"), down, swap));
  const help = multiple > 1 ? `Multiples of ${multiple} pixels.` : "";
  const aside = el("span", { className: "hint" }, multiple > 1 ? `steps of ${multiple} px` : "");
  const field = labelled("size", "Size", box, { wide: true, help, aside, input: across });

  function shapeButton([name, a, d]) {
    const size = sizeOf(a, d, [width, height], multiple);
    const box = el("span", { className: "shape", "aria-hidden": "true" });
    const scale = 13 / Math.max(a, d);
    box.style.width = `${a * scale}px`;
    box.style.height = `${d * scale}px`;
    const button = el("button", {
      type: "button", title: `${size[0]} × ${size[1]}`, "aria-label": `${name}, ${size[0]} by ${size[1]}`,
      onclick: () => set(...size),
    }, box, el("span", { "aria-hidden": "true" }, name));
    button.dataset.size = size.join("x");
    return button;
  }

  function mark() {
    const said = `${across.value}x${down.value}`;
    for (const button of shapes) button.setAttribute("aria-pressed", String(button.dataset.size === said));
  }

  function set(newWidth, newHeight) {
    across.value = newWidth ?? "";
    down.value = newHeight ?? "";
    mark();
    across.dispatchEvent(new Event("change", { bubbles: true }));
  }

  box.addEventListener("input", mark);
  mark();
  return {
    name: "size",
    ...field,
    get: () => (across.value && down.value ? `${across.value}x${down.value}` : undefined),
    set: (value) => set(...(value && value !== "auto" ? value.split("x") : [known ? width : "", known ? height : ""])),
  };
}
