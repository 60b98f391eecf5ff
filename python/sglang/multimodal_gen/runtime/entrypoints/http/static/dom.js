// Small helpers to build elements. Text goes in as text nodes alone: nothing here parses HTML.

/** An element. `props` are properties; `data-*`, `aria-*`, `role` and `for` are attributes; `on*` are listeners. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (/^(data-|aria-)|^(role|for|list|colspan|inputmode)$/.test(name)) node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Say something to screen readers, without moving the focus. */
export function announce(text) {
  const live = byId("live");
  if (live.textContent === text) live.textContent = "";
  live.textContent = text;
}

/** Show or hide an error's text under a field or a form. */
export function showError(node, text) {
  node.textContent = text || "";
  node.hidden = !text;
}

/** Seconds as people say them: 0.8 s, 12 s, 3 min 5 s. */
export function seconds(value) {
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 90) return `${Math.round(value)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function when(milliseconds) {
  return new Date(milliseconds).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}
