// The views of one or several runs: samples, ranks, checkpoints, events, log, configuration.

import { get } from "./data.js";
import { bytes, colour, duration, element, dateTime, whole } from "./format.js";

const MOST_COMPARED = 6;
const SHOWN_BYTES = 98_304; // of a log

function empty(title, text, code) {
  return element("div", { class: "empty" }, element("h2", {}, title), element("p", {}, text), code ? element("pre", {}, code) : null);
}

function table(titles, rows, kind = "") {
  return element("div", { class: "card scroll" }, element("table", { class: `list ${kind}` },
    element("thead", {}, element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)))),
    element("tbody", {}, ...rows)));
}

function cell(content, kind) {
  return element("td", kind ? { class: kind } : {}, content ?? "");
}

/** A name that wraps only after a dot or an underscore. */
function breakable(name) {
  return element("span", {}, ...name.split(/(?<=[._])/).flatMap((part, index) => (index ? [element("wbr"), part] : [part])));
}

/** The bar that selects the run of a view. */
function runBar(state, ...more) {
  const choice = element("select", { "aria-label": "Run", onchange: (event) => state.focus(Number(event.target.value)) },
    ...state.listed().map((run) => element("option", { value: String(run.id), selected: run.id === state.focused }, run.name)));
  return element("div", { class: "bar" }, element("label", {}, "Run", choice), ...more);
}

export async function samples(state) {
  const chosen = [state.focused, ...state.chosen().filter((run) => run !== state.focused)].slice(0, MOST_COMPARED);
  const answers = await Promise.all(chosen.map(async (run) => [run, (await get("/api/details", { run })).samples]));
  const withSamples = answers.filter(([, entries]) => entries.length);
  if (!withSamples.length) {
    return [runBar(state), empty("No samples yet", "A run completes the prompts of a file, one per line, at each evaluation:",
      "python pretrain_gpt.py … --sample-prompts prompts.txt --eval-interval 500")];
  }
  const steps = [...new Set(withSamples.flatMap(([, entries]) => entries.map((one) => one.iteration)))].sort((a, b) => a - b);
  const step = state.sampleStep === null ? steps.at(-1) : steps.filter((one) => one <= state.sampleStep).at(-1) ?? steps[0];
  const slider = element("input", { type: "range", min: "0", max: String(steps.length - 1), step: "1",
    value: String(steps.indexOf(step)), "aria-label": "Step of the samples", "aria-valuetext": `step ${step}`,
    oninput: (event) => {
      const index = Number(event.target.value);
      state.sampleStep = index === steps.length - 1 ? null : steps[index];
      state.refreshPanel();
    } });
  const bar = runBar(state, element("label", {}, "Step", slider, element("output", {}, whole(step))),
    element("span", { class: "label" }, `${steps.length} evaluations`));
  const byPrompt = new Map();
  for (const [run, entries] of withSamples) {
    const one = entries.filter((entry) => entry.iteration <= step).at(-1);
    for (const { prompt, text } of one?.samples ?? []) {
      const sample = element("p", {}, element("span", { class: "swatch", color: colour(run, state.isDark) }),
        element("span", { class: "who" }, `${state.name(run)}, step ${whole(one.iteration)}`), element("span", { class: "text" }, text || "(nothing)"));
      byPrompt.set(prompt, [...(byPrompt.get(prompt) ?? []), sample]);
    }
  }
  const cards = [...byPrompt].map(([prompt, completions]) => element("article", { class: "card sample" }, element("h3", {}, `${prompt} …`), ...completions));
  return [bar, element("div", { class: "samples" }, ...cards)];
}

const PHASES = { init: "starting", data: "data", forward: "forward", p2p: "pipeline", backward: "backward", step: "update",
  evaluation: "evaluation", save: "saving", end: "ended" };

export async function ranks(state) {
  const { layout, heartbeats, heartbeats_age_seconds: age } = await get("/api/details", { run: state.focused });
  const sizes = Object.fromEntries(heartbeats.axes ?? []);
  const size = (name) => sizes[name] ?? layout[name] ?? 1;
  const [pp, tp] = [size("pp"), size("tp")];
  const perStage = (heartbeats.ranks?.length || pp * size("dp") * tp) / pp;
  const known = new Map((heartbeats.ranks ?? []).map((one) => [one.rank, one]));
  const run = state.run(state.focused);
  const isLive = run.state === "running" && age !== null;
  const note = age === null ? "This run writes no heartbeats; only its layout is known."
    : isLive ? `Last heartbeat ${duration(age)} ago.` : `Last known state of the ranks, ${duration(age)} ago.`;
  const stages = Array.from({ length: pp }, (_, stage) => {
    const replicas = Array.from({ length: perStage / tp }, (_, replica) => element("div", { class: "replica" },
      ...Array.from({ length: tp }, (_, part) => rankBox(stage * perStage + replica * tp + part, known, isLive))));
    return element("div", { class: "stage" }, element("h3", {}, pp > 1 ? `Pipeline stage ${stage}` : "All layers"), ...replicas);
  });
  const axes = Object.entries({ ...layout, ...sizes }).filter(([, count]) => count > 1).map(([name, count]) => `${name.toUpperCase()} ${count}`);
  return [runBar(state, element("span", { class: "badge" }, axes.join(" × ") || "1 rank")),
    element("p", { class: "note" }, `${note} Each frame contains one tensor-parallel group.`),
    element("div", { class: "grid" }, ...stages)];
}

function rankBox(number, known, isLive) {
  const one = known.get(number);
  const idle = one?.idle_seconds ?? 0;
  const level = !one ? "" : one.state === "lost" ? "bad" : !isLive ? "" : idle > 60 ? "bad" : idle > 15 ? "notice" : "good";
  const where = !one ? "" : one.state === "lost" ? "lost" : PHASES[one.phase] ?? one.phase;
  return element("div", { class: "rank", "data-level": level }, element("b", {}, `rank ${number}`),
    element("span", {}, one ? `${where} · step ${whole(one.step)}` : ""),
    element("span", {}, one && isLive && idle >= 1 ? `for ${duration(idle)}` : ""));
}

const LEVELS = { complete: "good", damaged: "bad", unreadable: "bad", unfinished: "notice", deleted: "notice", aside: "notice" };

export async function checkpoints(state) {
  const { folder, checkpoints } = await get("/api/checkpoints", { run: state.focused });
  if (!folder) return [runBar(state), empty("This run saves no checkpoints", "Set a folder and an interval:", "python pretrain_gpt.py … --save checkpoints/first --save-interval 500")];
  if (!checkpoints.length) return [runBar(state), empty("No checkpoints", `None were found in ${folder}. A relative path starts at the folder in which the dashboard was started.`)];
  const rows = checkpoints.map((one) => element("tr", {}, cell(whole(one.step), "number"),
    cell(element("span", { class: "badge", "data-level": LEVELS[one.state] ?? "" }, one.state)), cell(bytes(one.size_bytes), "number"),
    cell(one.layout ? Object.entries(one.layout).map(([axis, count]) => `${axis.toUpperCase()}${count}`).join(" ") : ""),
    cell(one.validation_loss?.toFixed(4) ?? "", "number"), cell(one.problem || one.path, "value")));
  return [runBar(state, element("span", { class: "label" }, folder)), table(["Step", "State", "Size", "Layout", "Validation loss", "Folder"], rows)];
}

export async function events(state) {
  const { events } = await get("/api/details", { run: state.focused });
  if (!events.length) return [runBar(state), empty("No events yet", "Starts, resumes, saves, skipped updates and stops appear here.")];
  const rows = events.reverse().map((one) => element("tr", {},
    cell(dateTime(one.at), "number"), cell(one.iteration === null ? "" : whole(one.iteration), "number"),
    cell(element("span", { class: "badge", "data-level": one.level }, one.kind)), cell(one.text)));
  return [runBar(state), table(["When", "Step", "Event", ""], rows)];
}

export async function log(state) {
  const { text, size_bytes: size } = await get("/api/log", { run: state.focused });
  if (!text) return [runBar(state), empty("The log is empty", "The output of rank 0 appears here.")];
  const shown = element("pre", { class: "log", tabindex: "0", "aria-label": "End of the log" }, text);
  const isAtEnd = state.logIsAtEnd ?? true;
  shown.addEventListener("scroll", () => { state.logIsAtEnd = shown.scrollHeight - shown.scrollTop - shown.clientHeight < 40; });
  requestAnimationFrame(() => { shown.scrollTop = isAtEnd ? shown.scrollHeight : state.logTop ?? 0; });
  return [element("div", { class: "column" }, runBar(state, element("span", { class: "label" }, size > SHOWN_BYTES ? `last part of ${bytes(size)}` : bytes(size))), shown)];
}

export async function configuration(state) {
  const chosen = [state.focused, ...state.chosen().filter((run) => run !== state.focused)].slice(0, MOST_COMPARED);
  const { runs, differences } = await get("/api/configurations", { runs: chosen.join() });
  const isCompared = runs.length > 1;
  const names = isCompared && !state.showsWholeConfiguration ? differences : Object.keys(runs[0].rows);
  const filter = (state.configurationFilter ?? "").toLowerCase();
  const search = element("input", { type: "search", placeholder: "Filter fields", value: state.configurationFilter ?? "", "aria-label": "Filter fields",
    oninput: (event) => { state.configurationFilter = event.target.value; state.refreshPanel(); } });
  const whole = element("input", { type: "checkbox", checked: Boolean(state.showsWholeConfiguration),
    onchange: (event) => { state.showsWholeConfiguration = event.target.checked; state.refreshPanel(); } });
  const bar = runBar(state, search, isCompared ? element("label", {}, whole, "show equal fields") : null,
    element("span", { class: "label" }, isCompared ? `${differences.length} fields differ · ` : "", "highlighted: ", element("span", { class: "given" }, "set by the user")));
  if (!Object.keys(runs[0].rows).length) return [bar, empty("No configuration", "This folder has no config.json.")];
  const rows = names.filter((name) => name.toLowerCase().includes(filter)).map((name) => element("tr", {}, cell(breakable(name), "field"),
    ...runs.map((run) => cell(element("span", { class: run.given.includes(name) ? "given" : "" }, run.rows[name] ?? "–"), "value"))));
  return [bar, table(["Field", ...runs.map((run) => state.name(run.id))], rows, "configuration")];
}
