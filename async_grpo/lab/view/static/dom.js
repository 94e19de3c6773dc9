// Elements made of text alone: what a run wrote reaches the page by textContent, never as markup.

/** An element with properties (on*: listeners; data-*, aria-* and others: attributes) and children (nodes or text). */
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

/** Nodes that show the text with its control, direction and invisible characters written out as U+XXXX. */
export function visible(text) {
  const nodes = [];
  let from = 0;
  for (const found of String(text).matchAll(HIDDEN)) {
    const character = found[0];
    if (character === "\t") continue;
    nodes.push(text.slice(from, found.index));
    if (character === "\n") nodes.push(el("span", { class: "hidden-character", "aria-hidden": "true" }, "↵"), "\n");
    else {
      const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      nodes.push(el("span", { class: "hidden-character" }, `U+${code}`));
    }
    from = found.index + character.length;
  }
  nodes.push(String(text).slice(from));
  return nodes;
}

/** A number for people: at most `digits` after the point; "–" for none. */
export function figure(value, digits = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return Number(value).toLocaleString("en", { maximumFractionDigits: digits });
}

/** What to say while only the share `read` of the files has been read, and when to ask for more; "" and null at the end. */
export const stillReading = (read) => (read < 1 ? `Still reading: ${Math.floor(100 * read)} %. ` : "");
export const readAgain = (read, refresh) => (read < 1 ? setTimeout(refresh, 100) : null);

/** JSON of an address of this server. Throws an Error with the server's own words. */
export async function fetchJson(address, options = {}) {
  const answer = await fetch(address, options);
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(typeof body.detail === "string" ? body.detail : `the server answered ${answer.status}`);
  return body;
}
