// Samples of a run: search and filters, the list of groups, and the completions of a group next to each other.

import { dateTime, el, fetchJson, figure, runPath, visible } from "./dom.js";
import { tokenFacts, tokenText, tone, versionsOf, versionsOfGroup } from "./tokens.js";

export const REASONING = "(?i)<think>|\\bwait\\b|\\blet me (check|verify|re)|\\bdouble[- ]check|\\bon second thought";
const PAGE_SIZE = 25;
const REFRESH_MS = 700;
const NEWS = " New groups have come: search again to see them.";
const SORTS = {
  newest: "newest first",
  oldest: "oldest first",
  reward: "highest mean reward",
  spread: "widest spread of rewards",
  length: "longest completion",
  age: "oldest tokens",
  step: "step that trained it",
};
const STATES = { "": "any", trained: "trained", untrained: "not trained (yet)", unverifiable: "unverifiable" };
const RANGES = { reward: "Reward", age: "Age", version: "Policy version", step: "Step" };
const PLACES = { any: "prompts and completions", prompt: "prompts", completion: "completions" };
const ORDERS = { reward: "best first", sampled: "as sampled" };
const DEFAULTS = { sort: "newest", within: "any" };

/** The view. `parameters`: a URLSearchParams that the address keeps; `changed(parameters)` writes it back. Returns
 * `refresh`, called when the run has new rows, and `close`. */
export function samplesView(root, run, parameters, changed) {
  const list = el("ol", { class: "groups", "aria-label": "Groups" });
  const status = el("p", { class: "status", role: "status" });
  const growth = el("p", { class: "growth" });
  const more = el("button", { type: "button", hidden: true, onclick: () => load({ append: true }) }, "More groups");
  const detail = el("section", { class: "group-detail", "aria-label": "Group", tabindex: "-1" });
  const form = filterForm(parameters, applyFilters);
  const lists = el("div", { class: "samples" }, el("div", { class: "groups-pane" }, list, more), detail);
  root.replaceChildren(form.element, status, growth, lists);

  const shownIds = new Set();
  let nextStart = null;
  let refreshTimer = 0;
  let request = 0;
  let openGroupData = null;

  function applyFilters() {
    for (const [name, value] of Object.entries(form.values())) {
      if (value === "" || value === false) parameters.delete(name);
      else parameters.set(name, value);
    }
    parameters.delete("group");
    delete detail.dataset.id;
    changed(parameters);
    load({ append: false });
  }

  async function load({ append }) {
    const mine = ++request;
    const query = new URLSearchParams(parameters);
    // These belong to the page alone; the server would reject them.
    query.delete("group");
    query.delete("order");
    if (append && nextStart !== null) query.set("start", nextStart);

    list.setAttribute("aria-busy", "true");
    try {
      const page = await fetchJson(`${runPath(run)}/samples?${query}`);
      if (mine !== request) return;
      showPage(page, append);
      // While the index is built, the newest groups may still be missing. A search that found nothing within its
      // second continues from where it stopped.
      if (page.indexed < 1) setTimeout(() => mine === request && load({ append: false }), REFRESH_MS);
      else if (page.items.length === 0 && page.next !== null) load({ append: true });
    } catch (error) {
      if (mine === request) status.textContent = error.message;
    } finally {
      list.setAttribute("aria-busy", "false");
    }
  }

  function showPage(page, append) {
    const focusedId = list.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    nextStart = page.next;
    more.hidden = page.next === null;
    if (!append) {
      list.replaceChildren();
      shownIds.clear();
    }
    for (const item of page.items) {
      if (shownIds.has(item.id)) continue;
      shownIds.add(item.id);
      list.append(groupItem(item, () => openGroup(item.id, { byReader: true })));
    }

    status.textContent = statusText(page, parameters.get("q"), shownIds.size);
    if (page.facts) {
      form.showOptions(page.facts);
      growth.replaceChildren(...growthNote(page.facts.growth, (id) => openGroup(id, { byReader: true })));
    }
    const wanted = parameters.get("group") ?? page.items[0]?.id;
    if (wanted && !detail.dataset.id) openGroup(wanted, { byReader: false });
    markOpenGroup();
    if (focusedId) list.querySelector(`[data-id="${CSS.escape(focusedId)}"]`)?.focus({ preventScroll: true });
  }

  function markOpenGroup() {
    for (const button of list.querySelectorAll("button")) {
      if (button.dataset.id === detail.dataset.id) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
  }

  async function openGroup(id, { byReader }) {
    detail.dataset.id = id;
    markOpenGroup();
    try {
      const group = await fetchJson(`${runPath(run)}/samples/${encodeURIComponent(id)}`);
      if (detail.dataset.id !== id) return;
      openGroupData = group;
      showGroup();
    } catch (error) {
      detail.replaceChildren(el("p", { role: "alert" }, error.message));
    }
    if (byReader) {
      parameters.set("group", id);
      changed(parameters);
      detail.focus({ preventScroll: false });
    }
  }

  function showGroup() {
    const { prompt } = openGroupData.row;
    const findPrompt = () => form.search({ q: prompt.slice(0, 400), regex: false, within: "prompt" });
    const order = ORDERS[parameters.get("order")] ? parameters.get("order") : "reward";
    const setOrder = (value) => {
      parameters.set("order", value);
      changed(parameters);
      showGroup();
    };
    detail.replaceChildren(...groupDetail(openGroupData, { findPrompt, order, setOrder }));
  }

  function refresh() {
    // A reader who has paged further would lose the place, so only a note says that there is more.
    if (list.childElementCount > PAGE_SIZE) {
      if (!status.textContent.endsWith(NEWS)) status.textContent += NEWS;
    } else if (!refreshTimer) {
      refreshTimer = setTimeout(() => {
        refreshTimer = 0;
        load({ append: false });
      }, REFRESH_MS);
    }
  }

  load({ append: false });
  const close = () => {
    request += 1;
    clearTimeout(refreshTimer);
  };
  return { refresh, close };
}

function statusText(page, searched, shown) {
  if (page.groups === 0 && page.indexed === 1) {
    return "This run has no samples (telemetry.samples_every says how many are kept).";
  }
  const completions = `${figure(page.completions)} completions`;
  const parts = [`${figure(page.matching)} of ${figure(page.groups)} groups pass the filters (${completions})`];
  if (searched) parts.push(`searched ${figure(page.searched)} of them, ${figure(shown)} shown`);
  if (page.indexed < 1) parts.push(`still reading: ${Math.floor(100 * page.indexed)}%`);
  if (page.unreadable) parts.push(`${figure(page.unreadable)} lines could not be read`);
  return `${parts.join("; ")}.`;
}

function growthNote(growth, open) {
  if (!growth) return [];
  const change = `from ${figure(growth.from_tokens, 0)} to ${figure(growth.to_tokens, 0)} tokens`;
  const link = el("button", { type: "button", class: "link", onclick: () => open(growth.id) }, `group ${growth.seq}`);
  return [`Completions grew: the mean of 32 groups went ${change} by `, link, "."];
}

/** The form of search and filters. `apply` is called when a field has changed. Returns its element, the values of its
 * fields, `showOptions(facts)` for what the run has, and `search(values)`, which fills it in and applies it. */
function filterForm(parameters, apply) {
  const inputs = {};

  const field = (name, label, input) => {
    inputs[name] = input;
    input.name = name;
    if (input.type === "checkbox") input.checked = parameters.get(name) === "true";
    else input.value = parameters.get(name) ?? input.value;
    return el("label", {}, el("span", {}, label), input);
  };
  const select = (options) => {
    return el("select", {}, Object.entries(options).map(([value, text]) => el("option", { value }, text)));
  };
  const range = ([name, label]) => {
    const number = () => el("input", { type: "number", step: "any", placeholder: "" });
    const from = field(`${name}_min`, "from", number());
    const to = field(`${name}_max`, "to", number());
    return el("fieldset", {}, el("legend", {}, label), from, to);
  };

  function search(values) {
    for (const [name, value] of Object.entries(values)) {
      if (name === "regex") inputs[name].checked = value;
      else inputs[name].value = value;
    }
    apply();
  }

  function clear() {
    inputs.q.value = "";
    for (const name of ["within", "sort", "finish", "server", "state"]) inputs[name].selectedIndex = 0;
    apply();
  }

  const searchRow = el(
    "div",
    { class: "search-row" },
    field("q", "Search", el("input", { type: "search", maxlength: 400, spellcheck: "false" })),
    field("within", "in", select(PLACES)),
    field("regex", "as a regular expression", el("input", { type: "checkbox" })),
    field("sort", "Sort", select(SORTS)),
    el("button", { type: "submit" }, "Search"),
  );
  const hasFilter = [...parameters.keys()].some((key) => /_m|finish|server|state/.test(key));
  const filters = el(
    "details",
    { open: hasFilter },
    el("summary", {}, "Filters"),
    el(
      "div",
      { class: "filter-row" },
      Object.entries(RANGES).map(range),
      field("finish", "Finish reason", select({ "": "any" })),
      field("server", "Server", select({ "": "any" })),
      field("state", "State", select(STATES)),
      // The browser resets the fields after this event.
      el("button", { type: "reset", onclick: () => setTimeout(clear) }, "Clear"),
    ),
  );
  const label = "Pattern of reasoning";
  const pattern = el("input", { type: "text", value: REASONING, "aria-label": label, spellcheck: "false" });
  const findFirst = () => search({ q: pattern.value, regex: true, within: "completion", sort: "oldest" });
  const firstReasoning = el(
    "details",
    {},
    el("summary", {}, "First time it reasoned"),
    el("p", {}, "The first group in time with a completion that matches this pattern:"),
    el("div", { class: "search-row" }, pattern, el("button", { type: "button", onclick: findFirst }, "Find the first")),
  );

  const submit = (event) => {
    event.preventDefault();
    apply();
  };
  const properties = { class: "filters", role: "search", "aria-label": "Samples", onsubmit: submit };
  const element = el("form", properties, searchRow, filters, firstReasoning);
  element.addEventListener("change", (event) => {
    if (event.target !== pattern) apply();
  });

  function values() {
    const found = {};
    for (const [name, input] of Object.entries(inputs)) {
      const value = input.type === "checkbox" ? input.checked : input.value;
      found[name] = value === DEFAULTS[name] ? "" : value;
    }
    return found;
  }

  function showOptions(facts) {
    addOptions(inputs.finish, facts.finishes, parameters.get("finish"));
    addOptions(inputs.server, facts.servers, parameters.get("server"));
    const limits = { reward: facts.rewards, age: [0, facts.age], version: facts.versions, step: [1, facts.steps] };
    for (const [name, limit] of Object.entries(limits)) {
      inputs[`${name}_min`].placeholder = limit ? figure(limit[0]) : "";
      inputs[`${name}_max`].placeholder = limit ? figure(limit[1]) : "";
    }
  }

  return { element, values, showOptions, search };
}

function addOptions(select, names, chosen) {
  const present = new Set([...select.options].map((option) => option.value));
  for (const name of names) {
    if (!present.has(name)) select.append(el("option", { value: name }, name));
  }
  if (chosen) select.value = chosen;
}

function groupItem(item, open) {
  const marks = item.rewards.map((reward, index) => {
    const [level, mark] = rewardMark(reward);
    return el("span", { class: `reward ${level}${item.matches.includes(index) ? "" : " faint"}` }, mark);
  });
  const [oldest, newest] = item.versions;
  const facts = [
    item.step === null || item.step === undefined ? "not trained" : `step ${item.step}`,
    oldest === newest ? `v${oldest}` : `v${oldest}–v${newest}`,
    `age ${item.age}`,
    item.server,
  ];
  const [before, match, after] = item.snippet ?? [];
  const snippet = item.snippet && [visible(before), el("mark", {}, visible(match)), visible(after)];
  const button = el(
    "button",
    { type: "button", "data-id": item.id, onclick: open },
    el("span", { class: "group-title" }, `Group ${item.seq}`, el("small", {}, facts.join(" · "))),
    el("span", { class: "prompt" }, visible(item.prompt)),
    snippet && el("span", { class: "snippet" }, snippet.flat()),
    el("span", { class: "rewards", role: "img", "aria-label": describeRewards(item.rewards) }, marks),
  );
  return el("li", {}, button);
}

/** Class and sign of a reward. */
function rewardMark(reward) {
  if (reward === null) return ["none", "?"];
  if (reward >= 1) return ["high", "●"];
  return reward > 0 ? ["middle", "◐"] : ["low", "○"];
}

function describeRewards(rewards) {
  const judged = rewards.filter((reward) => reward !== null);
  const mean = judged.reduce((sum, reward) => sum + reward, 0) / judged.length;
  return `${rewards.length} completions, mean reward ${figure(mean)}`;
}

function groupDetail({ row, trained }, { findPrompt, order, setOrder }) {
  const completions = row.completions ?? [];
  const versions = versionsOfGroup(completions);
  // The age of a token is relative to the version that trained it; before that, to the server's version.
  const atVersion = trained ? trained.step - 1 : row.inserted_version;

  const hint = "Point at a token, or move over a completion with the arrow keys.";
  const panel = el("div", { class: "token-panel", role: "status", "aria-label": "Token" }, hint);
  const showToken = (completion, facts) => (index) => {
    const entries = tokenFacts(completion, index, facts);
    panel.replaceChildren(...entries.map(([name, value]) => el("span", {}, el("b", {}, `${name} `), visible(value))));
  };
  const cards = sortedPlaces(completions, order).map((place) => {
    const facts = completionFacts(completions[place], place, atVersion, trained);
    return completionCard(completions[place], place, versions, facts, showToken);
  });

  const orderChoice = el("select", { onchange: (event) => setOrder(event.target.value) });
  for (const [value, title] of Object.entries(ORDERS)) {
    orderChoice.append(el("option", { value, selected: value === order }, title));
  }
  return [
    el("h2", {}, `Group ${row.seq}`),
    el("p", { class: "group-facts" }, groupFacts(row, trained)),
    promptSection(row, findPrompt),
    versionLegend(versions, atVersion, completions),
    el("div", { class: "toolbar" }, el("label", {}, "Completions ", orderChoice)),
    panel,
    el("div", { class: "completions" }, cards),
  ];
}

/** Indices of the completions: as sampled, or by falling reward with those without a verdict last. */
function sortedPlaces(completions, order) {
  const places = completions.map((_, place) => place);
  if (order === "sampled") return places;
  const rewardOf = (place) => completions[place].reward ?? -Infinity;
  return places.sort((a, b) => {
    if (rewardOf(a) === rewardOf(b)) return a - b;
    return rewardOf(b) > rewardOf(a) ? 1 : -1;
  });
}

function groupFacts(row, trained) {
  let fate = "in no step so far: still waiting, or released untrained";
  if (trained) fate = trained.skipped ? `step ${trained.step} was skipped` : `trained by step ${trained.step}`;
  return `${row.server}, ${dateTime(row.time_s)}; admitted at v${row.admitted_version}; ${fate}.`;
}

function promptSection(row, findPrompt) {
  const link = el("button", { type: "button", class: "link", onclick: findPrompt }, "all groups of this prompt");
  return el(
    "div",
    { class: "prompt-whole" },
    el("h3", {}, "Prompt"),
    el("pre", { tabindex: "0" }, visible(row.prompt)),
    el("p", {}, el("b", {}, "Reference answer "), visible(row.answer), " ", link),
  );
}

function completionFacts(completion, place, atVersion, trained) {
  return {
    versionOf: versionsOf(completion.spans, completion.pieces?.length ?? 0),
    atVersion,
    trained: Boolean(trained),
    maskBelow: trained?.mask_below,
    advantage: trained?.advantages?.[place] ?? null,
    whyNoAdvantage: trained ? "not recorded: the KL penalty is in the reward" : "not known: no step has trained it",
  };
}

function versionLegend(versions, atVersion, completions) {
  const counts = new Map(versions.map((version) => [version, 0]));
  for (const completion of completions) {
    for (const [version, start, end] of completion.spans ?? []) counts.set(version, counts.get(version) + end - start);
  }
  const entries = versions.map((version) => {
    const sign = el("span", { class: `token ${tone(versions, version)}` }, `v${version}`);
    return el("li", {}, sign, ` age ${atVersion - version}, ${figure(counts.get(version))} tokens`);
  });
  const hasTool = completions.some((completion) => (completion.turns ?? []).some((turn) => !turn[2]));
  if (hasTool) entries.push(el("li", {}, el("span", { class: "token tool" }, "tool"), " written by the environment"));
  entries.push(el("li", {}, el("span", { class: "token unlikely" }, "bold"), " probability below 10%"));
  return el("ul", { class: "legend", "aria-label": "Policy versions that wrote the tokens" }, entries);
}

function completionCard(completion, place, versions, facts, showToken) {
  const spans = completion.spans ?? [];
  const head = [
    ["reward", completion.unverifiable ? "none" : figure(completion.reward)],
    ["advantage", facts.advantage === null ? "–" : figure(facts.advantage, 3)],
    ["tokens", figure(spans.at(-1)?.[2])],
    ["finish", completion.finish_reason],
    ["age", figure(facts.trained && spans.length ? facts.atVersion - spans[0][0] : completion.age)],
  ];
  const title = `Completion ${place + 1}`;
  const rewards = Object.entries(completion.rewards ?? {}).map(([name, value]) =>
    el("li", {}, visible(name), " ", el("b", {}, figure(value, 3))),
  );
  const authors = spans.map(([version, start, end]) => `v${version} wrote tokens ${start + 1} to ${end}`).join(", ");
  return el(
    "article",
    { class: "completion", "aria-label": title },
    el("h3", {}, title),
    el("dl", {}, head.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, visible(value))))),
    completion.unverifiable && el("p", { class: "verdict" }, "No verdict: ", visible(completion.unverifiable)),
    rewards.length > 0 && el("ul", { class: "by-name" }, rewards),
    tokenText(completion, title, versions, facts, showToken(completion, facts)),
    !completion.pieces && el("p", { class: "note" }, `This run was recorded without tokens: ${authors}.`),
  );
}
