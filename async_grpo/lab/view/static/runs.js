// All runs and their state: sort, filter, open one, or select several to compare.

import { el, fetchJson, figure, readAgain, stillReading } from "./dom.js";

const COLUMNS = [
  { key: "name", title: "Run", show: (run) => el("a", { href: `#/run/${encodeURIComponent(run.id)}/overview`, "data-focus": `open ${run.id}` }, run.name) },
  { key: "status", title: "State", show: (run) => el("span", { class: `state state-${run.status}`, title: run.reason }, run.status) },
  { key: "step", title: "Steps", number: true, show: (run) => `${figure(run.step ?? 0, 0)} / ${figure(run.steps, 0)}` },
  { key: "reward", title: "Reward", number: true, show: (run) => figure(run.reward, 3) },
  { key: "accuracy", title: "Held out", number: true, show: (run) => figure(run.accuracy, 3) },
  { key: "tokens_per_s", title: "Tokens/s", number: true, show: (run) => figure(run.tokens_per_s, 0) },
  { key: "max_staleness", title: "S", number: true, show: (run) => figure(run.max_staleness, 0) },
  { key: "age_max", title: "Max age / bound", number: true, show: (run) => ages(run) },
  { key: "duration_s", title: "Duration", number: true, show: (run) => duration(run.duration_s) },
  { key: "changed_s", title: "Last written", number: true, show: (run) => new Date(1000 * run.changed_s).toLocaleString() },
];
const STATES = ["live", "finished", "interrupted", "failed"];

function ages(run) {
  const broken = run.age_bound !== null && run.age_max > run.age_bound;
  return el("span", { class: broken ? "error" : null }, `${figure(run.age_max, 0)} / ${figure(run.age_bound, 0)}${broken ? " broken" : ""}`);
}

/** Format seconds as 1:02:03 or 2:03. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  const whole = Math.round(seconds);
  const two = (part) => String(part).padStart(2, "0");
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** The list. The address keeps the filter (q, state), the order (sort=KEY or -KEY) and the selection (run). */
export function runsView(root, _, parameters, changed) {
  const chosen = new Set(parameters.getAll("run"));
  let runs = null;
  let reading = null;
  const filter = el("input", { type: "search", placeholder: "Name", value: parameters.get("q") ?? "", oninput: () => set("q", filter.value) });
  const state = el("select", { onchange: () => set("state", state.value) }, el("option", { value: "" }, "any"), STATES.map((name) => el("option", {}, name)));
  state.value = parameters.get("state") ?? "";
  const compare = el("a", { class: "button" }, "Compare");
  const status = el("p", { class: "status", role: "status" });
  const table = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" });
  root.replaceChildren(el("div", { class: "toolbar" }, el("label", {}, "Filter ", filter), el("label", {}, "State ", state), compare), status, table);

  function set(name, value) {
    if (value) parameters.set(name, value);
    else parameters.delete(name);
    changed(parameters);
    draw();
  }

  async function refresh() {
    try {
      runs = await fetchJson("/api/runs");
      draw();
      clearTimeout(reading);
      reading = readAgain(Math.min(...runs.map((run) => run.read)), refresh);
    } catch (error) {
      status.textContent = error.message;
    }
  }

  function draw() {
    if (!runs) return;
    const wanted = filter.value.toLowerCase();
    const shown = runs.filter((run) => run.name.toLowerCase().includes(wanted) && (!state.value || run.status === state.value));
    const count = runs.length ? `${shown.length} of ${runs.length} runs` : "No runs yet: async-grpo run CONFIG starts one.";
    status.textContent = stillReading(Math.min(...runs.map((run) => run.read))) + count;
    const focus = document.activeElement?.dataset?.focus;
    table.hidden = !runs.length;
    table.replaceChildren(el("table", {}, heads(), el("tbody", {}, sorted(shown).map(row))));
    if (focus) table.querySelector(`[data-focus="${CSS.escape(focus)}"]`)?.focus();
    showChoice();
  }

  function showChoice() {
    compare.textContent = chosen.size > 1 ? `Compare ${chosen.size} runs` : "Choose runs to compare";
    if (chosen.size > 1) compare.setAttribute("href", `#/compare?${new URLSearchParams([...chosen].map((run) => ["run", run]))}`);
    else compare.removeAttribute("href");
  }

  function sorted(list) {
    const order = parameters.get("sort");
    if (!order) return list;
    const key = order.replace(/^-/, "");
    const sign = order.startsWith("-") ? -1 : 1;
    const value = (run) => run[key] ?? -Infinity;
    return [...list].sort((a, b) => sign * (value(a) > value(b) ? 1 : value(a) < value(b) ? -1 : 0));
  }

  function heads() {
    const order = parameters.get("sort") ?? "";
    const head = ({ key, title, number }) => {
      const direction = order === key ? "ascending" : order === `-${key}` ? "descending" : null;
      const next = direction === "descending" ? key : `-${key}`;
      const arrow = direction === null ? "" : direction === "ascending" ? " ▲" : " ▼";
      const button = el("button", { type: "button", "data-focus": `sort ${key}`, onclick: () => set("sort", next) }, title, el("span", { "aria-hidden": "true" }, arrow));
      return el("th", { scope: "col", class: number ? "number" : null, "aria-sort": direction }, button);
    };
    return el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Choose"), COLUMNS.map(head)));
  }

  function row(run) {
    const toggle = (event) => {
      if (event.target.checked) chosen.add(run.id);
      else chosen.delete(run.id);
      parameters.delete("run");
      for (const id of chosen) parameters.append("run", id);
      changed(parameters);
      showChoice();
    };
    const box = el("input", { type: "checkbox", checked: chosen.has(run.id), "aria-label": `Choose ${run.name}`, "data-focus": `choose ${run.id}`, onchange: toggle });
    return el("tr", {}, el("td", {}, box), COLUMNS.map(({ show, number }) => el("td", { class: number ? "number" : null }, show(run))));
  }

  refresh();
  return { refresh, close: () => clearTimeout(reading) };
}
