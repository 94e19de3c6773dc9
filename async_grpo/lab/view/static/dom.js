// DOM elements built from text only: what a run wrote reaches the page as text, never as markup. Also number formats.

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

/** Create an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
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
    if (character === "\n") {
      nodes.push(el("span", { class: "hidden-character", "aria-hidden": "true" }, "↵"), "\n");
    } else {
      const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      nodes.push(el("span", { class: "hidden-character" }, `U+${code}`));
    }
    from = match.index + character.length;
  }
  nodes.push(String(text).slice(from));
  return nodes;
}

/** Return nodes of a sentence in which `commands` between backticks are code. */
export function withCode(text) {
  return String(text)
    .split("`")
    .map((part, index) => (index % 2 ? el("code", {}, visible(part)) : el("span", {}, visible(part))));
}

/** A table in a box that scrolls sideways on narrow screens. `heads` are th elements. */
export function scrollingTable(label, heads, rows) {
  const table = el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, table);
}

/** Format a number with at most `digits` decimals; "–" for a missing one. */
export function figure(value, digits = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return Number(value).toLocaleString("en", { maximumFractionDigits: digits });
}

/** Format a number with exactly `digits` decimals, so that a column of them lines up. */
export function fixed(value, digits = 3) {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : Number(value).toFixed(digits);
}

/** Format a share of 0 to 1 as percent. */
export function percent(share, digits = 0) {
  return share === null || share === undefined || Number.isNaN(share) ? "–" : `${figure(100 * share, digits)}%`;
}

/** Format seconds as 1:02:03 or 2:03. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  const whole = Math.round(seconds);
  const twoDigits = (part) => String(part).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${twoDigits(minutes)}:${twoDigits(whole % 60)}` : `${minutes}:${twoDigits(whole % 60)}`;
}

/** Format a time as 2026-11-28 14:09, in the reader's time zone. */
export function dateTime(seconds) {
  const date = new Date(1000 * seconds);
  const twoDigits = (part) => String(part).padStart(2, "0");
  const day = [date.getFullYear(), twoDigits(date.getMonth() + 1), twoDigits(date.getDate())].join("-");
  return `${day} ${twoDigits(date.getHours())}:${twoDigits(date.getMinutes())}`;
}

/** Note while only the share `read` of the files has been read; "" once all is read. */
export const stillReading = (read) => (read < 1 ? `Still reading: ${Math.floor(100 * read)}%. ` : "");

/** Timer that calls `refresh` while only a share of the files has been read; null once all is read. */
export const readAgain = (read, refresh) => (read < 1 ? setTimeout(refresh, 100) : null);

/** Path of a run's data on this server. */
export const runPath = (id) => `/api/runs/${encodeURIComponent(id)}`;

/** Name of a run or sweep from its id, in which ~ replaces the slash. */
export const nameOf = (id) => id.replaceAll("~", "/");

/** Fetch JSON from this server. Throws an Error with the server's message. */
export async function fetchJson(address, options = {}) {
  const response = await fetch(address, options);
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  throw new Error(typeof body.detail === "string" ? body.detail : `the server answered ${response.status}`);
}

/** Replace the content of `root` by the message of an error. */
export function showError(root, error) {
  root.replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
}
