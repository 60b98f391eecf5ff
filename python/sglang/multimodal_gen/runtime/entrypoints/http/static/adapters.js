// The adapters that the server has loaded: a weight for each that a request shall use.

import { el } from "./dom.js";
import { labelled } from "./fields.js";

export function adapterField(names) {
  const rows = names.map((adapter) => {
    const use = el("input", { type: "checkbox", value: adapter });
    const weight = el("input", {
      type: "number", step: 0.05, value: 1, inputmode: "decimal", disabled: true, "aria-label": `Weight of ${adapter}`,
    });
    use.addEventListener("change", () => (weight.disabled = !use.checked));
    return { adapter, use, weight };
  });
  const box = el("div", { className: "adapters", role: "group", "aria-label": "Adapters" },
    rows.map(({ adapter, use, weight }) => el("div", { className: "adapter" }, el("label", {}, use, el("span", {}, adapter)), weight)));
  return {
    name: "lora",
    ...labelled("lora", "Adapters", box, { wide: true, input: rows[0].use }),
    get: () => {
      const used = rows.filter((row) => row.use.checked);
      return used.length ? used.map((row) => ({ name: row.adapter, weight: Number(row.weight.value) })) : undefined;
    },
    set: (value) => {
      const weights = new Map((value || []).map((each) => [each.name, each.weight]));
      for (const row of rows) {
        row.use.checked = weights.has(row.adapter);
        row.weight.disabled = !row.use.checked;
        row.weight.value = weights.get(row.adapter) ?? 1;
      }
    },
  };
}
