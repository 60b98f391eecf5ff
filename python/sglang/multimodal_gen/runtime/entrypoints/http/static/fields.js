// The kinds of field that the form is made of. Each has a name, a node, get() and set(); get() gives
// undefined where nothing is said, so that the server's own default holds.

import { el, showError } from "./dom.js";

let serial = 0;

/** A label, a control, and room for what is wrong with it. */
export function labelled(name, text, control, { help = "", wide = false, aside = null, input = control } = {}) {
  const id = `field-${name}-${(serial += 1)}`;
  input.id = id;
  const error = el("p", { className: "error", id: `${id}-error`, hidden: true });
  input.setAttribute("aria-describedby", error.id);
  const node = el(
    "div",
    { className: wide ? "field wide" : "field", title: help, "data-field": name },
    el("div", { className: "field-head" }, el("label", { for: id }, text), aside),
    control,
    error,
  );
  return {
    node,
    /** Show what is wrong, and say whether there is a control to go to. */
    fault(problem) {
      showError(error, problem);
      if (problem) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    },
    focus: () => input.focus(),
  };
}

/** Text of several lines; grows with what is in it. */
export function textArea(name, text, { rows = 3, placeholder = "", limit = null, help = "" } = {}) {
  const area = el("textarea", { name, rows, placeholder, spellcheck: true });
  const count = el("span", { className: "hint count" });
  const grow = () => {
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight + 2, 320)}px`;
    const near = limit && area.value.length > 0.8 * limit;
    count.textContent = near ? `${area.value.length} / ${limit}` : "";
    count.classList.toggle("over", Boolean(limit) && area.value.length > limit);
  };
  area.addEventListener("input", grow);
  return {
    name,
    ...labelled(name, text, area, { wide: true, help, aside: count }),
    get: () => area.value || undefined,
    set: (value) => {
      area.value = value ?? "";
      grow();
    },
  };
}

export function numberField(name, text, { whole = false, min, max, step, placeholder = "", help = "" } = {}) {
  const input = el("input", {
    type: "number", name, placeholder, step: step ?? (whole ? 1 : "any"), inputmode: whole ? "numeric" : "decimal",
    min: min ?? "", max: max ?? "", autocomplete: "off",
  });
  const field = labelled(name, text, input, { help });
  return {
    name,
    ...field,
    get: () => {
      if (input.validity.badInput) throw new FieldFault(name, "must be a number");
      return input.value === "" ? undefined : Number(input.value);
    },
    set: (value) => (input.value = value ?? ""),
  };
}

/** A number with a slider beside it; the slider ends at `soft`, the number does not. */
export function sliderField(name, text, { whole = true, min, soft, step = 1, help = "" }) {
  const field = numberField(name, text, { whole, min, step: whole ? 1 : "any", help });
  const input = field.node.querySelector("input");
  const slider = el("input", { type: "range", min, max: soft, step, tabIndex: -1, "aria-hidden": "true" });
  const paint = () => {
    slider.value = input.value === "" ? min : input.value;
    const share = (Number(slider.value) - min) / (soft - min || 1);
    slider.style.setProperty("--share", `${100 * share}%`);
  };
  slider.addEventListener("input", () => {
    input.value = slider.value;
    paint();
    input.dispatchEvent(new Event("change", { bubbles: true }));
  });
  input.addEventListener("input", paint);
  const row = el("div", { className: "slider" }, slider);
  input.replaceWith(row);
  row.append(input);
  return {
    ...field,
    set: (value) => {
      input.value = value ?? "";
      paint();
    },
  };
}

/** A few choices, all in sight. */
export function segments(name, text, choices, { help = "", wide = false } = {}) {
  const group = `group-${name}-${(serial += 1)}`;
  const inputs = choices.map(([value, label]) =>
    el("label", { className: "segment" }, el("input", { type: "radio", name: group, value }), el("span", {}, label)),
  );
  const box = el("div", { className: "segments", role: "radiogroup", "aria-label": text }, inputs);
  const first = box.querySelector("input");
  const field = labelled(name, text, box, { help, wide, input: first });
  return {
    name,
    ...field,
    get: () => box.querySelector("input:checked")?.value,
    set: (value) => {
      for (const input of box.querySelectorAll("input")) input.checked = input.value === String(value ?? choices[0][0]);
    },
    onChange: (act) => box.addEventListener("change", act),
  };
}

export function selectField(name, text, choices, { help = "" } = {}) {
  const select = el("select", { name }, choices.map(([value, label]) => el("option", { value }, label)));
  return {
    name,
    ...labelled(name, text, select, { help }),
    get: () => select.value || undefined,
    set: (value) => (select.value = value ?? choices[0][0]),
    onChange: (act) => select.addEventListener("change", act),
  };
}

export function checkField(name, text, { help = "" } = {}) {
  const input = el("input", { type: "checkbox", name });
  const field = labelled(name, text, input, { help });
  field.node.classList.add("check");
  return { name, ...field, get: () => input.checked, set: (value) => (input.checked = Boolean(value)) };
}

/** A line of text, or a value as JSON writes it. */
export function lineField(name, text, { json = false, help = "" } = {}) {
  const input = el("input", { type: "text", name, autocomplete: "off", spellcheck: false, placeholder: json ? "JSON" : "" });
  return {
    name,
    ...labelled(name, text, input, { help }),
    get: () => {
      if (input.value.trim() === "") return undefined;
      if (!json) return input.value;
      try {
        return JSON.parse(input.value);
      } catch {
        throw new FieldFault(name, "must be valid JSON");
      }
    },
    set: (value) => (input.value = value === undefined || value === null ? "" : json ? JSON.stringify(value) : value),
  };
}

/** A seed: left empty it is random. Kept as text, since it may be larger than a number can be. */
export function seedField(name, help = "") {
  const input = el("input", { type: "text", name, inputmode: "numeric", placeholder: "random", autocomplete: "off" });
  const dice = el("button", {
    type: "button", className: "quiet icon", "aria-label": "A new seed each time", title: "A new seed each time",
    onclick: () => {
      input.value = "";
      input.dispatchEvent(new Event("change", { bubbles: true }));
    },
  }, "⟳");
  const field = labelled(name, "Seed", el("div", { className: "joined" }, input, dice), { help, input });
  return {
    name,
    ...field,
    get: () => {
      const text = input.value.trim();
      if (text === "" || text === "-1") return undefined;
      if (!/^\d+$/.test(text)) throw new FieldFault(name, "must be a whole number, or empty for a random one");
      return text;
    },
    set: (value) => (input.value = value ?? ""),
  };
}

/** A fault that the page itself found. */
export class FieldFault extends Error {
  constructor(name, problem) {
    super(problem);
    this.param = name;
  }
}
