// DOM elements built from text only: what a run wrote reaches the page as text, never as markup.

/** Create an element with properties (on*: listeners; all others: attributes) and children (nodes or text). */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const HIDDEN = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\u2028\u2029]/gu;

/** Return nodes that show the text with control, direction and invisible characters as U+XXXX. */
export function visible(text) {
  const nodes = [];
  let from = 0;
  for (const match of String(text).matchAll(HIDDEN)) {
    const character = match[0];
    if (character === "\t") continue;
    nodes.push(text.slice(from, match.index));
    if (character === "\n") nodes.push(el("span", { class: "hidden-character", "aria-hidden": "true" }, "↵"), "\n");
    else {
      const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      nodes.push(el("span", { class: "hidden-character" }, `U+${code}`));
    }
    from = match.index + character.length;
  }
  nodes.push(String(text).slice(from));
  return nodes;
}

/** Format a number with at most `digits` decimals; "–" for a missing one. */
export function figure(value, digits = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return Number(value).toLocaleString("en", { maximumFractionDigits: digits });
}

/** Note and timer while only the share `read` of the files has been read; "" and null once all is read. */
export const stillReading = (read) => (read < 1 ? `Still reading: ${Math.floor(100 * read)} %. ` : "");
export const readAgain = (read, refresh) => (read < 1 ? setTimeout(refresh, 100) : null);

/** Fetch JSON from this server. Throws an Error with the server's message. */
export async function fetchJson(address, options = {}) {
  const response = await fetch(address, options);
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(typeof body.detail === "string" ? body.detail : `the server answered ${response.status}`);
  return body;
}
