// Reports of runs and sweeps, in frames without scripts, and the list of sweeps.

import { dateTime, el, fetchJson, nameOf, runPath, scrollingTable, showError } from "./dom.js";

// The frame may lead to other pages when its reader clicks a link, but run nothing.
const SANDBOX = [
  "allow-same-origin",
  "allow-popups",
  "allow-popups-to-escape-sandbox",
  "allow-top-navigation-by-user-activation",
].join(" ");

/** A frame as high as its content. */
function reportFrame(kind, id) {
  const src = `/reports/${kind}/${encodeURIComponent(id)}/report?theme=${document.documentElement.dataset.theme}`;
  const frame = el("iframe", { class: "report", sandbox: SANDBOX, src, title: `Report of ${nameOf(id)}` });
  const fitHeight = () => {
    frame.height = frame.contentDocument.body.scrollHeight + 20;
  };
  frame.addEventListener("load", () => {
    fitHeight();
    frame.contentDocument.addEventListener("toggle", fitHeight, true);
  });
  return frame;
}

/** report.md of a run. */
export function reportView(root, id) {
  async function refresh() {
    try {
      const run = await fetchJson(runPath(id));
      const nothing = el("p", {}, "There is no report yet: it is written when the run ends.");
      root.replaceChildren(run.has_report ? reportFrame("runs", id) : nothing);
    } catch (error) {
      showError(root, error);
    }
  }

  refresh();
  window.addEventListener("themechange", refresh);
  return { refresh, close: () => window.removeEventListener("themechange", refresh) };
}

/** The sweeps below the folder. */
export function sweepsView(root) {
  const heads = [["Sweep"], ["Runs finished", "number"], ["Recommended"], ["Last written", "number"]];
  const headCells = heads.map(([title, kind]) => el("th", { scope: "col", class: kind }, title));
  const row = (sweep) =>
    el(
      "tr",
      {},
      el("td", {}, el("a", { href: `#/sweep/${encodeURIComponent(sweep.id)}` }, sweep.name)),
      el("td", { class: "number" }, `${sweep.finished} of ${sweep.points}`),
      el("td", {}, sweep.recommended ?? "–"),
      el("td", { class: "number" }, dateTime(sweep.changed_s)),
    );

  async function refresh() {
    try {
      const sweeps = await fetchJson("/api/sweeps");
      const nothing = el("p", {}, "There are no sweeps here: async-grpo sweep CONFIG --grid KEY=A,B makes one.");
      root.replaceChildren(sweeps.length ? scrollingTable("Sweeps", headCells, sweeps.map(row)) : nothing);
    } catch (error) {
      showError(root, error);
    }
  }

  refresh();
  return { refresh };
}

/** The report of a sweep, and a link to the curves of its runs. An open report is not reloaded. */
export function sweepView(root, id) {
  async function show() {
    try {
      const sweep = (await fetchJson("/api/sweeps")).find((each) => each.id === id);
      if (!sweep) throw new Error(`There is no sweep ${id}: it may have been removed or renamed.`);
      const query = new URLSearchParams(sweep.runs.map((run) => ["run", run]));
      const curves = el("a", { href: `#/compare?${query}` }, `Curves of its ${sweep.runs.length} runs`);
      const nothing = el("p", {}, "There is no report yet: it is written when the sweep ends.");
      const report = sweep.has_report ? reportFrame("sweeps", id) : nothing;
      root.replaceChildren(el("p", {}, sweep.runs.length ? curves : null), report);
    } catch (error) {
      showError(root, error);
    }
  }

  const refresh = () => {
    if (!root.querySelector("iframe")) show();
  };
  show();
  window.addEventListener("themechange", show);
  return { refresh, close: () => window.removeEventListener("themechange", show) };
}
