// All runs and their state: sort, filter, open one, or select several to compare. Points of a sweep are listed together
// under its name, by the settings in which they differ.

import { sparkline } from "./charts.js";
import { dateTime, duration, el, fetchJson, figure, fixed, readAgain, stillReading } from "./dom.js";

const COLUMNS = [
  { key: "name", title: "Run", show: runLink },
  { key: "status", title: "State", show: stateOf },
  { key: "step", title: "Steps", number: true, show: (run) => `${figure(run.step ?? 0, 0)} / ${figure(run.steps, 0)}` },
  { key: "reward", title: "Reward", number: true, show: rewardOf },
  { key: "accuracy", title: "Held out", number: true, show: (run) => fixed(run.accuracy) },
  { key: "tokens_per_s", title: "Tokens/s", number: true, show: (run) => figure(run.tokens_per_s, 0) },
  { key: "max_staleness", title: "S", number: true, show: (run) => figure(run.max_staleness, 0) },
  { key: "age_max", title: "Max age / bound", number: true, show: agesOf },
  { key: "duration_s", title: "Duration", number: true, show: (run) => duration(run.duration_s) },
  { key: "changed_s", title: "Last written", number: true, show: (run) => dateTime(run.changed_s) },
];
const STATES = ["live", "finished", "interrupted", "failed"];

function runLink(run) {
  const differing = settingsText(run);
  const properties = {
    href: `#/run/${encodeURIComponent(run.id)}/overview`,
    title: differing ? run.name : null,
    "data-focus": `open ${run.id}`,
  };
  return el("a", properties, differing || run.name);
}

function stateOf(run) {
  return el("span", { class: `state state-${run.status}`, title: run.reason }, run.status);
}

function rewardOf(run) {
  return [run.rewards.length > 1 ? sparkline(run.rewards) : null, ` ${fixed(run.reward)}`];
}

function agesOf(run) {
  const isBroken = run.age_bound !== null && run.age_max > run.age_bound;
  const text = `${figure(run.age_max, 0)} / ${figure(run.age_bound, 0)}${isBroken ? " broken" : ""}`;
  return el("span", { class: isBroken ? "error" : null }, text);
}

/** The settings in which a point of a sweep differs from its other points; "" for other runs. */
function settingsText(run) {
  return Object.entries(run.differing)
    .map(([key, value]) => `${key.split(".").at(-1)}=${typeof value === "string" ? value : JSON.stringify(value)}`)
    .join(", ");
}

/** Name of the sweep of a run; "" for other runs. */
function sweepOf(run) {
  return Object.keys(run.differing).length ? run.name.split("/").slice(0, -1).join("/").replace(/\/runs$/, "") : "";
}

/** The list. The address keeps the filter (q, state), the order (sort=KEY or -KEY) and the selection (run). */
export function runsView(root, _, parameters, changed) {
  const chosen = new Set(parameters.getAll("run"));
  let runs = null;
  let timer = null;

  const filter = el("input", { type: "search", placeholder: "Name", oninput: () => set("q", filter.value) });
  filter.value = parameters.get("q") ?? "";
  const state = el("select", { onchange: () => set("state", state.value) }, el("option", { value: "" }, "any"));
  state.append(...STATES.map((name) => el("option", {}, name)));
  state.value = parameters.get("state") ?? "";
  const comparison = el("span");
  const status = el("p", { class: "status", role: "status" });
  const table = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" });
  const labels = [el("label", {}, "Filter ", filter), el("label", {}, "State ", state)];
  const toolbar = el("div", { class: "toolbar" }, labels, comparison);
  root.replaceChildren(toolbar, status, table);

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
      clearTimeout(timer);
      timer = readAgain(Math.min(...runs.map((run) => run.read)), refresh);
    } catch (error) {
      status.textContent = error.message;
    }
  }

  function draw() {
    if (runs === null) return;
    const text = filter.value.toLowerCase();
    const matches = (run) => `${run.name} ${settingsText(run)}`.toLowerCase().includes(text);
    const shown = runs.filter((run) => matches(run) && (!state.value || run.status === state.value));
    const nothing = "No runs yet: async-grpo run CONFIG starts one.";
    const count = runs.length ? `${shown.length} of ${runs.length} runs` : nothing;
    status.textContent = stillReading(Math.min(...runs.map((run) => run.read))) + count;

    // The rows are new elements, so the focus must be put back to where the reader was.
    const focus = document.activeElement?.dataset?.focus;
    table.hidden = !runs.length;
    table.replaceChildren(el("table", {}, tableHead(), el("tbody", {}, tableRows(shown))));
    if (focus) table.querySelector(`[data-focus="${CSS.escape(focus)}"]`)?.focus();
    showComparison();
  }

  function showComparison() {
    if (chosen.size < 2) {
      comparison.replaceChildren(el("span", { class: "note" }, "Tick two or more runs to compare them."));
      return;
    }
    const query = new URLSearchParams([...chosen].map((run) => ["run", run]));
    comparison.replaceChildren(el("a", { class: "button", href: `#/compare?${query}` }, `Compare ${chosen.size} runs`));
  }

  /** Rows in the chosen order; without one, the latest first, and the points of a sweep together. */
  function tableRows(shown) {
    if (parameters.get("sort")) return sortRuns(shown).map((run) => runRow(run));

    const rows = [];
    const listed = new Set();
    for (const run of shown) {
      const sweep = sweepOf(run);
      if (!sweep) rows.push(runRow(run));
      if (!sweep || listed.has(sweep)) continue;
      listed.add(sweep);
      const points = shown.filter((other) => sweepOf(other) === sweep);
      rows.push(sweepRow(sweep, points.length), ...points.map((point) => runRow(point, "point")));
    }
    return rows;
  }

  function sortRuns(list) {
    const order = parameters.get("sort");
    const key = order.replace(/^-/, "");
    const sign = order.startsWith("-") ? -1 : 1;
    const valueOf = (run) => run[key] ?? -Infinity;
    return [...list].sort((a, b) => {
      if (valueOf(a) === valueOf(b)) return 0;
      return valueOf(a) > valueOf(b) ? sign : -sign;
    });
  }

  function tableHead() {
    const order = parameters.get("sort") ?? "";
    const cell = ({ key, title, number }) => {
      const direction = { [key]: "ascending", [`-${key}`]: "descending" }[order] ?? null;
      const arrow = { ascending: " ▲", descending: " ▼" }[direction] ?? "";
      const next = direction === "descending" ? key : `-${key}`;
      const properties = { type: "button", "data-focus": `sort ${key}`, onclick: () => set("sort", next) };
      const button = el("button", properties, title, el("span", { "aria-hidden": "true" }, arrow));
      return el("th", { scope: "col", class: number ? "number" : null, "aria-sort": direction }, button);
    };
    return el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Choose"), COLUMNS.map(cell)));
  }

  function sweepRow(name, count) {
    const link = el("a", { href: `#/sweep/${encodeURIComponent(name.replaceAll("/", "~"))}` }, name);
    const points = ` · sweep of ${count} ${count === 1 ? "run" : "runs"}`;
    return el("tr", { class: "sweep-row" }, el("td"), el("td", { colspan: COLUMNS.length }, link, points));
  }

  function runRow(run, kind) {
    const toggle = (event) => {
      if (event.target.checked) chosen.add(run.id);
      else chosen.delete(run.id);
      parameters.delete("run");
      for (const id of chosen) parameters.append("run", id);
      changed(parameters);
      showComparison();
    };
    const box = el("input", {
      type: "checkbox",
      checked: chosen.has(run.id),
      "aria-label": `Choose ${run.name}`,
      "data-focus": `choose ${run.id}`,
      onchange: toggle,
    });
    const cells = COLUMNS.map(({ key, number, show }) => {
      return el("td", { class: number ? "number" : `cell-${key}` }, show(run));
    });
    return el("tr", { class: kind }, el("td", {}, box), cells);
  }

  refresh();
  return { refresh, close: () => clearTimeout(timer) };
}
