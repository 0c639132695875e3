// The page: the list of runs, the views, and the user's settings, which are kept in the URL.

import { CurvesView } from "./curves.js";
import { follow, get } from "./data.js";
import { about, colour, element, short, whole } from "./format.js";
import * as panels from "./panels.js";

const VIEWS = { curves: "Curves", samples: "Samples", ranks: "Ranks", checkpoints: "Checkpoints", events: "Events", log: "Log", configuration: "Configuration" };
const STATES = { running: "running", finished: "finished", stopped: "stopped", failed: "failed", lost: "no heartbeat", idle: "not running", gone: "deleted", unreadable: "unreadable" };
const LOGARITHMIC = ["gradient_norm"];
const find = (id) => document.getElementById(id);

class State {
  constructor() {
    this.runs = new Map();
    this.left = new Set(); // names of hidden runs
    this.settings = { axis: "steps", logX: false, smoothing: 0, view: "curves", charts: null, logY: [...LOGARITHMIC] };
    this.focused = null;
    this.sampleStep = null;
    this.isDark = false;
    this.read();
  }

  /** Reads the settings from the URL, which can be shared and reloaded. */
  read() {
    try {
      const { left, ...settings } = JSON.parse(decodeURIComponent(location.hash.slice(1)) || "{}");
      Object.assign(this.settings, settings);
      this.left = new Set(left ?? []);
    } catch { /* a truncated URL */ }
  }

  set(changes) {
    Object.assign(this.settings, changes);
    const kept = { ...this.settings, ...(this.left.size ? { left: [...this.left] } : {}) };
    history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(kept))}`);
  }

  run(number) { return this.runs.get(number); }
  name(number) { return this.runs.get(number)?.name ?? "?"; }
  isChosen(number) { return this.runs.has(number) && !this.left.has(this.name(number)); }
  chosen() { return [...this.runs.keys()].filter((number) => this.isChosen(number)); }

  choose(numbers, isChosen) {
    for (const number of numbers) if (isChosen) this.left.delete(this.name(number)); else this.left.add(this.name(number));
    this.set({});
  }

  metrics() {
    return [...new Set(this.chosen().flatMap((number) => this.runs.get(number).metrics))];
  }

  showsMetric(metric, first) {
    return (this.settings.charts ?? first).includes(metric);
  }

  toggleMetric(metric, first) {
    const shown = this.settings.charts ?? [...first];
    this.set({ charts: shown.includes(metric) ? shown.filter((one) => one !== metric) : [...shown, metric] });
  }

  isLogY(metric) { return this.settings.logY.includes(metric); }

  toggleLogY(metric) {
    const { logY } = this.settings;
    this.set({ logY: this.isLogY(metric) ? logY.filter((one) => one !== metric) : [...logY, metric] });
  }

  /** The filtered and sorted runs. */
  listed() {
    const filter = find("filter").value.toLowerCase();
    const order = find("order").value;
    const loss = (run) => (Number.isFinite(run.loss) ? run.loss : Infinity);
    const comparison = {
      newest: (one, other) => other.changed_at - one.changed_at || one.id - other.id,
      name: (one, other) => one.name.localeCompare(other.name, undefined, { numeric: true }),
      loss: (one, other) => loss(one) - loss(other) || one.id - other.id,
    }[order];
    return [...this.runs.values()].filter((run) => run.name.toLowerCase().includes(filter)).sort(comparison);
  }

  focus(number) {
    this.focused = number;
    this.sampleStep = null;
    fillList();
    this.refreshPanel();
  }

  refreshPanel() { showPanel(); }
}

const state = new State();
const curvesView = new CurvesView(state);
const rows = new Map();

function rowOf(run) {
  let row = rows.get(run.id);
  if (!row) {
    const box = element("input", { type: "checkbox", onchange: () => { state.choose([run.id], box.checked); afterChoice(); } });
    const name = element("button", { class: "name", type: "button", onclick: () => state.focus(run.id),
      onfocus: () => curvesView.highlight(run.id), onblur: () => curvesView.highlight(null) });
    row = { box, name, state: element("span", { class: "state" }), figures: element("div", { class: "figures" }), progress: element("progress", { max: "1" }) };
    row.node = element("li", { class: "run", onpointerenter: () => curvesView.highlight(run.id), onpointerleave: () => curvesView.highlight(null) },
      box, name, row.state, row.figures, row.progress);
    rows.set(run.id, row);
  }
  const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };
  row.node.style.setProperty("--color", colour(run.id, state.isDark));
  row.node.dataset.focus = run.id === state.focused ? "yes" : "no";
  row.box.checked = state.isChosen(run.id);
  row.box.setAttribute("aria-label", `Show ${run.name}`);
  put(row.name, run.name);
  row.name.title = run.name;
  row.state.dataset.state = run.state;
  put(row.state, STATES[run.state] ?? run.state);
  const planned = run.train_iterations ? ` / ${whole(run.train_iterations)}` : "";
  const parts = run.points ? [`${whole(run.iteration)}${planned}`, `loss ${short(run.loss)}`] : ["no steps yet"];
  if (run.eta_seconds) parts.push(`${about(run.eta_seconds)} left`);
  if (run.reading < 1) parts.push(`reading ${Math.floor(run.reading * 100)} %`);
  put(row.figures, run.problem || parts.join(" · "));
  row.figures.title = run.problem;
  row.progress.value = run.train_iterations ? run.iteration / run.train_iterations : 0;
  row.progress.setAttribute("aria-label", `Progress of ${run.name}`);
  return row.node;
}

function fillList() {
  const listed = state.listed();
  const nodes = listed.map(rowOf);
  const list = find("runs");
  if (nodes.length !== list.children.length || nodes.some((node, index) => list.children[index] !== node)) {
    const focused = document.activeElement;
    list.replaceChildren(...nodes);
    if (focused && list.contains(focused)) focused.focus({ preventScroll: true });
  }
  find("count").textContent = `${state.chosen().length} of ${state.runs.size} shown`;
}

function afterChoice() {
  fillList();
  showPanel();
  curvesView.chosen();
}

let shownView = "";
let panelRequest = 0;

/** Fills the view. An older response never replaces a newer one, and the focus is kept. */
async function showPanel() {
  const { view } = state.settings;
  const node = find("view");
  for (const tab of find("tabs").children) {
    const isShown = tab.dataset.view === view;
    tab.setAttribute("aria-selected", String(isShown));
    tab.tabIndex = isShown ? 0 : -1;
  }
  node.setAttribute("aria-label", VIEWS[view]);
  panelRequest += 1;
  const request = panelRequest;
  const changed = shownView !== view;
  shownView = view;
  if (!state.runs.size) { node.replaceChildren(noRuns()); return; }
  if (!state.run(state.focused)) state.focused = state.listed()[0]?.id ?? [...state.runs.keys()][0];
  if (view === "curves") {
    const content = state.chosen().length ? curvesView.node : noChoice();
    if (node.firstChild !== content || node.children.length !== 1) node.replaceChildren(content);
    curvesView.show();
    return;
  }
  if (changed) node.replaceChildren(element("p", { class: "note" }, "Reading …"));
  try {
    const content = await panels[view](state);
    if (request !== panelRequest) return;
    const log = node.querySelector("pre.log");
    state.logTop = log?.scrollTop ?? 0;
    const label = node.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const caret = document.activeElement?.selectionStart;
    const top = node.scrollTop;
    node.replaceChildren(...content);
    node.scrollTop = changed ? 0 : top;
    const restored = label && node.querySelector(`[aria-label="${CSS.escape(label)}"]`);
    restored?.focus({ preventScroll: true });
    if (restored?.type === "search") restored.setSelectionRange(caret, caret);
  } catch (failure) {
    if (request === panelRequest) node.replaceChildren(element("div", { class: "empty" }, element("h2", {}, "This view failed"), element("p", {}, failure.message)));
  }
}

function noRuns() {
  return element("div", { class: "empty" }, element("h2", {}, "No runs yet"),
    element("p", {}, "A run appears when it writes its first files into the watched folder:"),
    element("pre", {}, `python pretrain_gpt.py … --run-dir ${state.folder ?? "runs"}/first`));
}

function noChoice() {
  return element("div", { class: "empty" }, element("h2", {}, "No run selected"), element("p", {}, "Select runs in the list."));
}

function onRuns(changed) {
  if (!changed.length) return;
  const isFirst = !state.runs.size;
  for (const run of changed) state.runs.set(run.id, run);
  fillList();
  if (isFirst || (state.settings.view !== "curves" && changed.some((run) => run.id === state.focused))) showPanel();
  curvesView.changed(changed.map((run) => run.id));
}

function setTheme(isDark) {
  state.isDark = isDark;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  fillList();
  curvesView.recolour();
}

function listen() {
  for (const [view, title] of Object.entries(VIEWS)) {
    find("tabs").append(element("button", { type: "button", role: "tab", id: `tab-${view}`, "data-view": view, "aria-controls": "view",
      onclick: () => { state.set({ view }); showPanel(); } }, title));
  }
  find("tabs").addEventListener("keydown", (event) => {
    const tabs = [...find("tabs").children];
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  });
  find("filter").addEventListener("input", fillList);
  find("order").addEventListener("change", fillList);
  find("all").addEventListener("click", () => { state.choose(state.listed().map((run) => run.id), true); afterChoice(); });
  find("none").addEventListener("click", () => { state.choose(state.listed().map((run) => run.id), false); afterChoice(); });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => setTheme(dark.matches));
  find("theme").addEventListener("click", () => setTheme(!state.isDark));
  setTheme(dark.matches);
}

listen();
const first = await get("/api/runs");
state.folder = first.folders[0];
find("folders").textContent = first.folders.join(", ");
onRuns(first.runs);
showPanel();
follow(onRuns, (connection) => {
  find("connection").dataset.state = connection;
  find("connection").textContent = { live: "live", lost: "disconnected" }[connection];
});
