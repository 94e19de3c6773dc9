// One completion, token by token, coloured by the policy version that wrote it.

import { el, figure, percent, visible } from "./dom.js";

const SHOWN_TOKENS = 2000;
const TONES = 8;
const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };
const UNLIKELY = Math.log(0.1);

/** Version of each token: spans are [version, start, end). */
export function versionsOf(spans, length) {
  const versions = new Array(length).fill(null);
  for (const [version, start, end] of spans ?? []) versions.fill(version, start, Math.min(end, length));
  return versions;
}

/** Versions of a whole group, oldest first: a version's index determines its colour and underline. */
export function versionsOfGroup(completions) {
  const found = new Set(completions.flatMap((one) => (one.spans ?? []).map((span) => span[0])));
  return [...found].sort((a, b) => a - b);
}

/** The classes of a version: the same in the legend and on tokens. */
export function tone(versions, version) {
  return `tone-${versions.indexOf(version) % TONES}`;
}

/** Data of a token as [name, value] pairs. `facts`: versions, the version at which it is trained, and its row of
 * trained.jsonl. */
export function tokenFacts(completion, index, facts) {
  const version = facts.versionOf[index];
  const tool = isToolToken(completion, index);
  const age = `${facts.atVersion - version} ${facts.trained ? "when trained" : "when finished"}`;
  const masked = !tool && version !== null && version < (facts.maskBelow ?? 0);
  return [
    ["token", `${index + 1} of ${completion.pieces.length}`],
    ["text", JSON.stringify(completion.pieces[index])],
    ["log-probability", tool ? "none: the environment wrote it" : figure(completion.logprobs?.[index], 4)],
    ["probability", tool ? "–" : percent(Math.exp(completion.logprobs?.[index] ?? NaN), 1)],
    ["policy version", version === null ? "–" : `v${version}`],
    ["age", version === null ? "–" : age],
    ["advantage", facts.advantage === null ? facts.whyNoAdvantage : figure(facts.advantage, 4)],
    ["gradient", tool ? "no: written by the environment" : masked ? "no: older than the bound, context only" : null],
  ].filter((pair) => pair[1] !== null);
}

/** The element of a completion's tokens. `show(index, facts)` is called for the token under the pointer or cursor. */
export function tokenText(completion, label, versions, facts, show) {
  const pieces = completion.pieces;
  if (!pieces) return el("div", { class: "tokens plain" }, visible(completion.text ?? ""));

  const box = el("div", {
    class: "tokens",
    tabindex: "0",
    role: "group",
    "aria-label": `${label}: ${pieces.length} tokens; arrow keys move over them`,
  });
  const more = el("button", { type: "button", class: "more", onclick: () => append(spans.length + SHOWN_TOKENS) });
  box.append(more);

  const spans = [];
  const append = (until) => {
    for (let index = spans.length; index < Math.min(until, pieces.length); index += 1) {
      const version = facts.versionOf[index];
      const startsVersion = version !== null && version !== facts.versionOf[index - 1];
      if (startsVersion && versions.length > 1) {
        more.before(el("sup", { class: `mark ${tone(versions, version)}` }, `v${version}`));
      }
      const classes = classesOf(completion, index, version, versions);
      const span = el("span", { class: classes }, visible(pieces[index] || "·"));
      span.dataset.place = index;
      more.before(span);
      spans.push(span);
    }
    more.hidden = spans.length >= pieces.length;
    more.textContent = `Show more of ${pieces.length} tokens`;
  };
  append(SHOWN_TOKENS);

  let cursor = -1;
  const moveTo = (index) => {
    if (spans.length === 0) return;
    spans[cursor]?.classList.remove("cursor");
    cursor = Math.max(0, Math.min(spans.length - 1, index));
    spans[cursor].classList.add("cursor");
    spans[cursor].scrollIntoView({ block: "nearest", inline: "nearest" });
    show(cursor);
  };

  box.addEventListener("focus", () => box.matches(":focus-visible") && moveTo(Math.max(0, cursor)));
  box.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (step === undefined || event.target !== box || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    moveTo(cursor + step);
  });
  box.addEventListener("mouseover", (event) => {
    const index = event.target.closest("[data-place]")?.dataset.place;
    if (index !== undefined) show(Number(index));
  });
  box.addEventListener("click", (event) => {
    const index = event.target.closest("[data-place]")?.dataset.place;
    if (index !== undefined) moveTo(Number(index));
  });
  return box;
}

function classesOf(completion, index, version, versions) {
  const isTool = isToolToken(completion, index);
  const isUnlikely = !isTool && (completion.logprobs?.[index] ?? 0) < UNLIKELY;
  return ["token", isTool ? "tool" : tone(versions, version), isUnlikely ? "unlikely" : ""].join(" ");
}

/** True if the environment wrote the token: turns are [start, end, written by the policy]. */
function isToolToken(completion, index) {
  return (completion.turns ?? []).some(([start, end, byPolicy]) => !byPolicy && start <= index && index < end);
}
