// The page: which view of which run the address names, the theme, and news of the run.
//
//   #/                      the runs
//   #/run/NAME/VIEW?...     a view of a run; what follows "?" belongs to the view
//
// A view is a function (root, run, parameters, changed) -> { refresh, close }. `refresh(files)` is called when the run
// has written to these files, `close` when the reader goes elsewhere.

import { el, fetchJson } from "./dom.js";
import { samplesView } from "./samples.js";
import { timelineView } from "./timeline.js";

const VIEWS = {
  samples: { title: "Samples", make: samplesView, files: /^(samples|trained)/ },
  timeline: { title: "Timeline", make: timelineView, files: /^timeline/ },
};

const page = Object.fromEntries(["views", "live", "theme", "title", "view", "main"].map((id) => [id, document.getElementById(id)]));
let shown = null;

/** What the address names. */
function place() {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  const [, kind, run, view] = path.split("/");
  if (kind !== "run" || !run) return { key: "", view: null };
  return { run: decodeURIComponent(run), view: VIEWS[view] ? view : "samples", parameters: new URLSearchParams(query) };
}

function show() {
  const { run, view, parameters } = place();
  if (location.hash === "#main") return page.main.focus();
  if (shown && shown.run === run && shown.view === view && shown.query === String(parameters ?? "")) return;
  shown?.close();
  document.title = run ? `${run} · ${VIEWS[view].title} · async-grpo` : "async-grpo";
  page.title.textContent = run ? `${run}: ${VIEWS[view].title.toLowerCase()}` : "Runs";
  showViews(run, view);
  page.live.textContent = "";
  shown = run ? openView(run, view, parameters) : openRuns();
}

function openView(run, view, parameters) {
  const current = { run, view, query: String(parameters) };
  const changed = (now) => {
    current.query = String(now);
    history.replaceState(null, "", `#/run/${encodeURIComponent(run)}/${view}${current.query && `?${current.query}`}`);
  };
  const made = VIEWS[view].make(page.view, run, parameters, changed);
  const events = new EventSource(`/api/runs/${encodeURIComponent(run)}/events`);
  events.addEventListener("rows", (event) => {
    const files = JSON.parse(event.data);
    page.live.textContent = "live";
    if (files.some((file) => VIEWS[view].files.test(file))) made.refresh(files);
  });
  current.close = () => {
    events.close();
    made.close();
  };
  return current;
}

function openRuns() {
  const current = { run: undefined, view: null, query: "", closed: false, close: () => (current.closed = true) };
  fetchJson("/api/runs")
    .then((runs) => current.closed || showRuns(runs))
    .catch((error) => (page.view.textContent = error.message));
  return current;
}

function showRuns(runs) {
  const row = (run) =>
    el("li", {}, el("a", { href: `#/run/${encodeURIComponent(run.name)}/samples` }, run.name), ` ${new Date(1000 * run.changed_s).toLocaleString()}`);
  page.view.replaceChildren(runs.length ? el("ul", {}, runs.map(row)) : el("p", {}, "No runs yet: async-grpo run CONFIG makes one."));
}

function showViews(run, current) {
  const link = ([id, view]) =>
    el("a", { href: `#/run/${encodeURIComponent(run)}/${id}`, "aria-current": id === current ? "page" : null }, view.title);
  page.views.replaceChildren(...(run ? Object.entries(VIEWS).map(link) : []));
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  page.theme.textContent = name === "dark" ? "Light" : "Dark";
  page.theme.setAttribute("aria-label", `${page.theme.textContent} theme`);
  window.dispatchEvent(new Event("themechange"));
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
theme(localStorage.getItem("theme") ?? (prefersDark.matches ? "dark" : "light"));
prefersDark.addEventListener("change", () => localStorage.getItem("theme") ?? theme(prefersDark.matches ? "dark" : "light"));
page.theme.addEventListener("click", () => {
  const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", other);
  theme(other);
});
window.addEventListener("hashchange", show);
show();
