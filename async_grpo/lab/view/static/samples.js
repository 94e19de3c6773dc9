// Samples of a run: search and filters, the list of groups, and the completions of a group next to each other.

import { el, fetchJson, figure, visible } from "./dom.js";
import { tokenFacts, tokenText, tone, versionsOf, versionsOfGroup } from "./tokens.js";

export const REASONING = "(?i)<think>|\\bwait\\b|\\blet me (check|verify|re)|\\bdouble[- ]check|\\bon second thought";
const PAGE = 25;
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

/** The view. `parameters`: a URLSearchParams that the address keeps; `changed(parameters)` writes it back. Returns
 * `refresh`, called when the run has new rows, and `close`. */
export function samplesView(root, run, parameters, changed) {
  const state = { next: null, waiting: 0, request: 0, shown: new Set() };
  const list = el("ol", { class: "groups", "aria-label": "Groups" });
  const status = el("p", { class: "status", role: "status" });
  const growth = el("p", { class: "growth" });
  const more = el("button", { type: "button", hidden: true, onclick: () => load(true) }, "More groups");
  const detail = el("section", { class: "group-detail", "aria-label": "Group", tabindex: "-1" });
  const form = filterForm(parameters, () => apply());
  root.replaceChildren(
    form.element,
    status,
    growth,
    el("div", { class: "samples" }, el("div", { class: "groups-pane" }, list, more), detail),
  );

  function apply() {
    for (const [name, value] of Object.entries(form.values())) {
      if (value === "" || value === false) parameters.delete(name);
      else parameters.set(name, value);
    }
    parameters.delete("group");
    delete detail.dataset.id;
    changed(parameters);
    load(false);
  }

  async function load(further) {
    const request = ++state.request;
    const query = new URLSearchParams(parameters);
    query.delete("group");
    if (further && state.next !== null) query.set("start", state.next);
    list.setAttribute("aria-busy", "true");
    try {
      const page = await fetchJson(`/api/runs/${encodeURIComponent(run)}/samples?${query}`);
      if (request !== state.request) return;
      show(page, further);
      if (page.indexed < 1) setTimeout(() => request === state.request && load(false), REFRESH_MS);
      else if (page.items.length === 0 && page.next !== null) load(true);
    } catch (error) {
      if (request === state.request) status.textContent = error.message;
    } finally {
      list.setAttribute("aria-busy", "false");
    }
  }

  function show(page, further) {
    const focused = list.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    state.next = page.next;
    more.hidden = page.next === null;
    if (!further) {
      list.replaceChildren();
      state.shown.clear();
    }
    for (const item of page.items) {
      if (state.shown.has(item.id)) continue;
      state.shown.add(item.id);
      list.append(groupItem(item, () => open(item.id, true)));
    }
    status.textContent = statusOf(page, parameters.get("q"), state.shown.size);
    if (page.facts) {
      form.facts(page.facts);
      growth.replaceChildren(...growthOf(page.facts.growth, (id) => open(id, true)));
    }
    const wanted = parameters.get("group") ?? page.items[0]?.id;
    if (wanted && !detail.dataset.id) open(wanted, false);
    mark();
    if (focused) list.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  function mark() {
    for (const button of list.querySelectorAll("button")) {
      if (button.dataset.id === detail.dataset.id) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
  }

  async function open(id, asked) {
    detail.dataset.id = id;
    mark();
    try {
      const group = await fetchJson(`/api/runs/${encodeURIComponent(run)}/samples/${encodeURIComponent(id)}`);
      if (detail.dataset.id !== id) return;
      detail.replaceChildren(...groupDetail(group, () => form.search({ q: group.row.prompt.slice(0, 400), regex: false, within: "prompt" })));
    } catch (error) {
      detail.replaceChildren(el("p", { role: "alert" }, error.message));
    }
    if (asked) {
      parameters.set("group", id);
      changed(parameters);
      detail.focus({ preventScroll: false });
    }
  }

  function refresh() {
    if (list.childElementCount > PAGE) {
      if (!status.textContent.endsWith(NEWS)) status.textContent += NEWS;
    } else if (!state.waiting) {
      state.waiting = setTimeout(() => {
        state.waiting = 0;
        load(false);
      }, REFRESH_MS);
    }
  }

  load(false);
  const close = () => {
    state.request += 1;
    clearTimeout(state.waiting);
  };
  return { refresh, close };
}

function statusOf(page, searched, shown) {
  if (page.groups === 0 && page.indexed === 1) return "This run has no samples (telemetry.samples_every says how many are kept).";
  const parts = [
    `${figure(page.matching)} of ${figure(page.groups)} groups pass the filters (${figure(page.completions)} completions)`,
  ];
  if (searched) parts.push(`searched ${figure(page.searched)} of them, ${figure(shown)} shown`);
  if (page.indexed < 1) parts.push(`still reading: ${Math.floor(100 * page.indexed)} %`);
  if (page.unreadable) parts.push(`${figure(page.unreadable)} lines could not be read`);
  return parts.join("; ") + ".";
}

function growthOf(growth, open) {
  if (!growth) return [];
  const text = `Completions grew: the mean of 32 groups went from ${figure(growth.from_tokens, 0)} to ${figure(growth.to_tokens, 0)} tokens by `;
  return [text, el("button", { type: "button", class: "link", onclick: () => open(growth.id) }, `group ${growth.seq}`), "."];
}

function filterForm(parameters, apply) {
  const inputs = {};
  const field = (name, label, input) => {
    inputs[name] = input;
    input.name = name;
    if (input.type === "checkbox") input.checked = parameters.get(name) === "true";
    else input.value = parameters.get(name) ?? input.value;
    return el("label", {}, el("span", {}, label), input);
  };
  const select = (options) => el("select", {}, Object.entries(options).map(([value, text]) => el("option", { value }, text)));
  const number = (placeholder) => el("input", { type: "number", step: "any", placeholder });
  const range = ([name, label]) =>
    el(
      "fieldset",
      {},
      el("legend", {}, label),
      field(`${name}_min`, "from", number("")),
      field(`${name}_max`, "to", number("")),
    );
  const first = el("input", { type: "text", value: REASONING, "aria-label": "Pattern of reasoning", spellcheck: "false" });
  const findFirst = () => {
    search({ q: first.value, regex: true, within: "completion", sort: "oldest" });
  };
  const search = (given) => {
    for (const [name, value] of Object.entries(given)) {
      if (name === "regex") inputs[name].checked = value;
      else inputs[name].value = value;
    }
    apply();
  };
  const element = el(
    "form",
    { class: "filters", role: "search", "aria-label": "Samples", onsubmit: (event) => (event.preventDefault(), apply()) },
    el(
      "div",
      { class: "search-row" },
      field("q", "Search", el("input", { type: "search", maxlength: 400, spellcheck: "false" })),
      field("within", "in", select({ any: "prompts and completions", prompt: "prompts", completion: "completions" })),
      field("regex", "as a regular expression", el("input", { type: "checkbox" })),
      field("sort", "Sort", select(SORTS)),
      el("button", { type: "submit" }, "Search"),
    ),
    el(
      "details",
      { open: [...parameters.keys()].some((key) => /_m|finish|server|state/.test(key)) },
      el("summary", {}, "Filters"),
      el(
        "div",
        { class: "filter-row" },
        Object.entries(RANGES).map(range),
        field("finish", "Finish reason", select({ "": "any" })),
        field("server", "Server", select({ "": "any" })),
        field("state", "State", select(STATES)),
        el("button", { type: "reset", onclick: () => setTimeout(() => clear(inputs, apply)) }, "Clear"),
      ),
    ),
    el(
      "details",
      {},
      el("summary", {}, "First time it reasoned"),
      el("p", {}, "The first group in time with a completion that matches this pattern:"),
      el("div", { class: "search-row" }, first, el("button", { type: "button", onclick: findFirst }, "Find the first")),
    ),
  );
  element.addEventListener("change", (event) => event.target !== first && apply());
  const values = () =>
    Object.fromEntries(
      Object.entries(inputs).map(([name, input]) => {
        if (input.type === "checkbox") return [name, input.checked];
        const usual = (name === "sort" && input.value === "newest") || (name === "within" && input.value === "any");
        return [name, usual ? "" : input.value];
      }),
    );
  const facts = (known) => {
    addOptions(inputs.finish, known.finishes, parameters.get("finish"));
    addOptions(inputs.server, known.servers, parameters.get("server"));
    const limits = { reward: known.rewards, age: [0, known.age], version: known.versions, step: [1, known.steps] };
    for (const [name, limit] of Object.entries(limits)) {
      inputs[`${name}_min`].placeholder = limit ? figure(limit[0]) : "";
      inputs[`${name}_max`].placeholder = limit ? figure(limit[1]) : "";
    }
  };
  return { element, values, facts, search };
}

function clear(inputs, apply) {
  inputs.q.value = "";
  for (const select of [inputs.within, inputs.sort, inputs.finish, inputs.server, inputs.state]) select.selectedIndex = 0;
  apply();
}

function addOptions(select, names, chosen) {
  const present = new Set([...select.options].map((option) => option.value));
  for (const name of names) if (!present.has(name)) select.append(el("option", { value: name }, name));
  if (chosen) select.value = chosen;
}

function groupItem(item, open) {
  const rewards = item.rewards.map((reward, place) => {
    const level = reward === null ? "none" : reward >= 1 ? "high" : reward > 0 ? "middle" : "low";
    const text = reward === null ? "?" : reward >= 1 ? "●" : reward > 0 ? "◐" : "○";
    return el("span", { class: `reward ${level}${item.matches.includes(place) ? "" : " faint"}` }, text);
  });
  const facts = [
    item.step === null || item.step === undefined ? "not trained" : `step ${item.step}`,
    item.versions[0] === item.versions[1] ? `v${item.versions[0]}` : `v${item.versions[0]}–v${item.versions[1]}`,
    `age ${item.age}`,
    item.server,
  ];
  const button = el(
    "button",
    { type: "button", "data-id": item.id, onclick: open },
    el("span", { class: "group-title" }, `Group ${item.seq}`, el("small", {}, facts.join(" · "))),
    el("span", { class: "prompt" }, visible(item.prompt)),
    item.snippet && el("span", { class: "snippet" }, visible(item.snippet[0]), el("mark", {}, visible(item.snippet[1])), visible(item.snippet[2])),
    el("span", { class: "rewards", role: "img", "aria-label": rewardWords(item.rewards) }, rewards),
  );
  return el("li", {}, button);
}

function rewardWords(rewards) {
  const judged = rewards.filter((reward) => reward !== null);
  const mean = judged.reduce((sum, reward) => sum + reward, 0) / judged.length;
  return `${rewards.length} completions, mean reward ${figure(mean)}`;
}

function groupDetail({ row, trained }, findPrompt) {
  const completions = row.completions ?? [];
  const versions = versionsOfGroup(completions);
  const atVersion = trained ? trained.step - 1 : row.inserted_version;
  const panel = el("div", { class: "token-panel", role: "status", "aria-label": "Token" }, "Point at a token, or move over a completion with the arrow keys.");
  const show = (completion, facts) => (place) =>
    panel.replaceChildren(...tokenFacts(completion, place, facts).map(([name, value]) => el("span", {}, el("b", {}, `${name} `), visible(value))));
  const state = trained ? (trained.skipped ? `step ${trained.step} was skipped` : `trained by step ${trained.step}`) : "in no step so far: still waiting, or released untrained";
  return [
    el("h2", {}, `Group ${row.seq}`),
    el("p", { class: "group-facts" }, `${row.server}, ${new Date(1000 * row.time_s).toLocaleString()}; admitted at v${row.admitted_version}; ${state}.`),
    el("div", { class: "prompt-whole" }, el("h3", {}, "Prompt"), el("pre", { tabindex: "0" }, visible(row.prompt)), el("p", {}, el("b", {}, "Reference answer "), visible(row.answer), " ", el("button", { type: "button", class: "link", onclick: findPrompt }, "all groups of this prompt"))),
    legend(versions, atVersion, completions),
    panel,
    el("div", { class: "completions" }, completions.map((one, place) => completionCard(one, place, versions, factsOf(one, place, atVersion, trained), show))),
  ];
}

function factsOf(completion, place, atVersion, trained) {
  const advantage = trained?.advantages?.[place] ?? null;
  return {
    versionOf: versionsOf(completion.spans, completion.pieces?.length ?? 0),
    atVersion,
    trained: Boolean(trained),
    maskBelow: trained?.mask_below,
    advantage,
    whyNoAdvantage: trained ? "not recorded: the KL penalty is in the reward" : "not known: no step has trained it",
  };
}

function legend(versions, atVersion, completions) {
  const counts = new Map(versions.map((version) => [version, 0]));
  for (const one of completions) for (const [version, start, end] of one.spans ?? []) counts.set(version, counts.get(version) + end - start);
  const entry = (version) =>
    el("li", {}, el("span", { class: `token ${tone(versions, version)}` }, `v${version}`), ` age ${atVersion - version}, ${figure(counts.get(version))} tokens`);
  const tool = completions.some((one) => (one.turns ?? []).some((turn) => !turn[2]));
  return el("ul", { class: "legend", "aria-label": "Policy versions that wrote the tokens" }, versions.map(entry), tool && el("li", {}, el("span", { class: "token tool" }, "tool"), " written by the environment"), el("li", {}, el("span", { class: "token unlikely" }, "bold"), " probability below 10 %"));
}

function completionCard(completion, place, versions, facts, show) {
  const rewards = Object.entries(completion.rewards ?? {});
  const head = [
    ["reward", completion.unverifiable ? "none" : figure(completion.reward)],
    ["advantage", facts.advantage === null ? "–" : figure(facts.advantage, 3)],
    ["tokens", figure((completion.spans ?? []).at(-1)?.[2])],
    ["finish", completion.finish_reason],
    ["age", figure(facts.trained && completion.spans?.length ? facts.atVersion - completion.spans[0][0] : completion.age)],
  ];
  return el(
    "article",
    { class: "completion", "aria-label": `Completion ${place + 1}` },
    el("h3", {}, `Completion ${place + 1}`),
    el("dl", {}, head.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, visible(value))))),
    completion.unverifiable && el("p", { class: "verdict" }, "No verdict: ", visible(completion.unverifiable)),
    rewards.length > 0 && el("ul", { class: "by-name" }, rewards.map(([name, value]) => el("li", {}, visible(name), " ", el("b", {}, figure(value, 3))))),
    tokenText(completion, `Completion ${place + 1}`, versions, facts, show(completion, facts)),
    !completion.pieces && el("p", { class: "note" }, "This run was recorded without tokens: ", (completion.spans ?? []).map(([version, start, end]) => `v${version} wrote tokens ${start + 1} to ${end}`).join(", "), "."),
  );
}
