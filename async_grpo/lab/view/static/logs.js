// The logs of a run's roles: the end of one, or the lines that a search finds in all of it.

import { el, fetchJson, runPath, visible } from "./dom.js";

const LEVELS = { any: "all lines", warning: "warnings and errors", error: "errors" };
const TYPING_MS = 250;

/** The view of one run. The address keeps the role, the text (q) and the level. */
export function logsView(root, run, parameters, changed) {
  const role = el("select", { onchange: () => choose("role", role.value) });
  const text = el("input", { type: "search", value: parameters.get("q") ?? "", oninput: searchSoon });
  const level = el("select", { onchange: () => choose("level", level.value) });
  level.append(...Object.entries(LEVELS).map(([value, title]) => el("option", { value }, title)));
  level.value = LEVELS[parameters.get("level")] ? parameters.get("level") : "any";
  const file = el("a", { download: true }, "Download");
  const status = el("p", { class: "status", role: "status" });
  const log = el("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Log" });
  const toolbar = el(
    "div",
    { class: "toolbar" },
    el("label", {}, "Role ", role),
    el("label", {}, "Find ", text),
    el("label", {}, "Show ", level),
    file,
  );
  root.replaceChildren(toolbar, status, log);

  let request = 0;
  let timer = null;

  function choose(name, value) {
    parameters.set(name, value);
    changed(parameters);
    refresh();
  }

  function searchSoon() {
    clearTimeout(timer);
    timer = setTimeout(() => choose("q", text.value), TYPING_MS);
  }

  async function refresh() {
    const mine = ++request;
    try {
      const { logs } = await fetchJson(runPath(run));
      if (mine !== request) return;
      const name = logs.includes(parameters.get("role")) ? parameters.get("role") : logs[0];
      showRoles(logs, name);
      if (!name) {
        log.replaceChildren("There are no logs: its roles have not started yet, or they run on other machines.");
        return;
      }

      const path = `${runPath(run)}/logs/${encodeURIComponent(name)}`;
      file.setAttribute("href", `${path}/file`);
      const found = await fetchJson(`${path}?${new URLSearchParams({ q: text.value, level: level.value })}`);
      if (mine === request) showText(found);
    } catch (error) {
      if (mine === request) log.textContent = error.message;
    }
  }

  function showRoles(logs, name) {
    const shown = [...role.options].map((option) => option.value);
    if (String(logs) !== String(shown)) {
      role.replaceChildren(...logs.map((each) => el("option", { value: each }, each)));
    }
    role.value = name ?? "";
    file.hidden = !name;
  }

  function showText(found) {
    const isSearch = text.value !== "" || level.value !== "any";
    let note = isSearch && !found.text ? "No line matches." : "";
    if (found.cut && isSearch) note = "The last matching lines; narrow the search to see earlier ones.";
    else if (found.cut) note = "The end of the log. Search or download to see the rest.";
    status.textContent = note;

    // Stay at the end of a growing log, but do not move a reader who has scrolled up.
    const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 40;
    log.replaceChildren(...found.text.split("\n").flatMap((line) => [...visible(line), "\n"]));
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  refresh();
  const close = () => {
    request += 1;
    clearTimeout(timer);
  };
  return { refresh, close };
}
