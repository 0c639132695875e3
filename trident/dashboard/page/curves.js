// The charts: their selection, their visible range, and requests for their curves.

import { curves } from "./data.js";
import { colour, dashes, duration, element, short, titled, whole } from "./format.js";
import { Plot } from "./plot.js";

const EXACT = new Set(["learning_rate"]); // a schedule has no noise
const FIRST = ["lm_loss", "gradient_norm", "learning_rate", "tokens_per_second"];
const LATER = ["consumed_samples", "gigaflops_without_embeddings", "nan_iterations", "skipped_iterations"];
const AXES = { steps: "Steps", tokens: "Tokens", hours: "Hours" };
const MOST_POINTS = 24_000; // per chart
const FEWEST_POINTS = 150; // per curve
const SETTLED_MILLISECONDS = 90; // after a zoom, before finer curves are requested
const RUNS_AT_A_TIME = 16; // per request, so that the first curves appear soon
const RETRY_MILLISECONDS = 2000;
const LEAST_MILLISECONDS = 500; // between two requests of a chart

export class CurvesView {
  constructor(state) {
    this.state = state;
    this.charts = new Map();
    this.range = null;
    this.grid = element("div", { class: "charts" });
    this.more = element("div", { class: "more" });
    this.bar = element("div", { class: "bar" });
    this.node = element("div", {}, this.bar, this.grid, this.more);
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const chart = [...this.charts.values()].find((one) => one.node === entry.target);
        if (!chart) continue;
        chart.isSeen = entry.isIntersecting;
        if (chart.isSeen) this.#request(chart);
      }
    }, { rootMargin: "300px" });
    this.#fillBar();
  }

  show() {
    this.#fillGrid();
    for (const chart of this.charts.values()) chart.plot.redraw();
  }

  /** Called when the selection of runs changes; loaded curves are kept. */
  chosen() {
    this.#fillGrid();
    this.#requestAll();
  }

  /** Called when runs have new data. */
  changed(runs) {
    this.#fillGrid();
    for (const chart of this.charts.values()) {
      for (const run of runs) if (this.state.isChosen(run)) chart.stale.add(run);
      this.#request(chart);
    }
  }

  recolour() {
    for (const chart of this.charts.values()) this.#draw(chart);
  }

  highlight(run) {
    for (const chart of this.charts.values()) chart.plot.highlight(run);
  }

  #fillBar() {
    const { settings } = this.state;
    const axis = element("span", { class: "choice", role: "radiogroup", "aria-label": "Horizontal axis" },
      ...Object.entries(AXES).map(([name, title]) => element("label", {},
        element("input", { type: "radio", name: "axis", value: name, checked: settings.axis === name,
          onchange: () => { this.state.set({ axis: name }); this.#changeAxis(); } }), title)));
    const log = element("input", { type: "checkbox", checked: settings.logX,
      onchange: (event) => { this.state.set({ logX: event.target.checked }); this.#changeAxis(); } });
    const value = element("output", {});
    const slider = element("input", { type: "range", min: "0", max: "100", step: "1", value: String(settings.smoothing),
      "aria-label": "Smoothing" });
    const show = () => { value.textContent = weightOf(Number(slider.value)).toFixed(3).replace(/0+$/, "").replace(/\.$/, ""); };
    slider.addEventListener("input", () => { show(); this.state.set({ smoothing: Number(slider.value) }); this.#reloadAll(); });
    show();
    this.reset = element("button", { type: "button", disabled: true, onclick: () => this.#zoom(null) }, "Reset zoom");
    this.bar.replaceChildren(axis, element("label", {}, log, "Log axis"),
      element("label", {}, "Smoothing", slider, value), element("span", { class: "spacer" }),
      element("span", { class: "label hint" }, "Drag across a chart to zoom"), this.reset);
  }

  /** Creates charts for the selected metrics, and keeps existing ones. */
  #fillGrid() {
    const known = this.state.metrics();
    const ordered = [...FIRST, ...known.filter((name) => !FIRST.includes(name) && !LATER.includes(name)), ...LATER]
      .filter((name) => known.includes(name) || FIRST.includes(name));
    const shown = ordered.filter((name) => this.state.showsMetric(name, FIRST));
    const key = `${shown.join()} ${ordered.join()}`;
    if (key === this.key) return;
    this.key = key;
    for (const [metric, chart] of this.charts) {
      if (shown.includes(metric)) continue;
      this.seen.unobserve(chart.node);
      this.charts.delete(metric);
    }
    for (const metric of shown) if (!this.charts.has(metric)) this.charts.set(metric, this.#chart(metric));
    const nodes = shown.map((metric) => this.charts.get(metric).node);
    if (nodes.some((node, index) => this.grid.children[index] !== node) || this.grid.children.length !== nodes.length) {
      this.grid.replaceChildren(...nodes);
    }
    this.more.replaceChildren("Charts:", ...ordered.map((metric) => element("button", {
      type: "button", "aria-pressed": String(shown.includes(metric)),
      onclick: () => { this.state.toggleMetric(metric, FIRST); this.#fillGrid(); },
    }, titled(metric)[0])));
  }

  #chart(metric) {
    const [title, unit] = titled(metric);
    const plot = new Plot({
      name: (run) => this.state.name(run),
      onZoom: (range) => this.#zoom(range),
      onPoint: (value) => { for (const chart of this.charts.values()) chart.plot.point(value); },
    });
    plot.above.setAttribute("aria-label", `${title}. Arrow keys move along the curves, plus and minus zoom.`);
    const chart = { metric, plot, curves: new Map(), stale: new Set(), isSeen: false, requestedAt: 0, version: 0 };
    const logY = element("button", { type: "button", "aria-pressed": String(this.state.isLogY(metric)),
      title: "Logarithmic vertical axis", onclick: () => {
        this.state.toggleLogY(metric);
        logY.setAttribute("aria-pressed", String(this.state.isLogY(metric)));
        this.#draw(chart);
      } }, "log");
    chart.node = element("section", { class: metric === FIRST[0] ? "card chart wide" : "card chart" },
      element("div", { class: "head" }, element("h2", {}, title), element("span", { class: "unit" }, unit), logY), plot.node);
    plot.emptyText = "";
    this.seen.observe(chart.node);
    return chart;
  }

  #zoom(range) {
    if (range && this.state.settings.axis === "steps" && range[1] - range[0] < 2) return;
    this.range = range;
    this.reset.disabled = range === null;
    for (const chart of this.charts.values()) {
      this.#draw(chart);
      chart.isWhole = false;
    }
    clearTimeout(this.zoomed);
    this.zoomed = setTimeout(() => this.#requestAll(), SETTLED_MILLISECONDS);
  }

  /** Keeps the curves on the previous axis until new ones arrive. */
  #changeAxis() {
    for (const chart of this.charts.values()) {
      chart.isHeld = true;
      chart.curves.clear();
    }
    this.range = null;
    this.reset.disabled = true;
    this.#reloadAll();
  }

  /** Requests all curves again, and keeps the present ones until they arrive. */
  #reloadAll() {
    for (const chart of this.charts.values()) chart.isWhole = false;
    this.#requestAll();
  }

  #requestAll() {
    for (const chart of this.charts.values()) this.#request(chart);
  }

  /** Requests the missing curves of a chart, some runs at a time; a chart has one request at a time. */
  async #request(chart) {
    if (!chart.isSeen || chart.isRequesting || chart.timer || !this.grid.isConnected) return;
    const chosen = this.state.chosen();
    if (!chart.isWhole) {
      chart.stale = new Set(chosen);
      chart.isUrgent = true;
      chart.isWhole = true;
    }
    const missing = chosen.filter((run) => chart.stale.has(run) || !chart.curves.has(run));
    if (!missing.length) { this.#draw(chart); return; }
    const wait = chart.requestedAt + Math.max(LEAST_MILLISECONDS, 4 * (chart.took ?? 0)) - performance.now();
    if (!chart.isUrgent && wait > 0) {
      chart.timer = setTimeout(() => { chart.timer = 0; this.#request(chart); }, wait);
      return;
    }
    const requested = missing.slice(0, RUNS_AT_A_TIME);
    chart.isUrgent &&= requested.length < missing.length;
    chart.isRequesting = true;
    chart.requestedAt = performance.now();
    for (const run of requested) chart.stale.delete(run);
    try {
      const { settings } = this.state;
      const { axis, logX } = settings;
      const drawn = await curves({
        metric: chart.metric, axis, scale: logX ? "log" : "linear",
        weight: weightOf(EXACT.has(chart.metric) ? 0 : settings.smoothing).toFixed(4), runs: requested.join(),
        points: Math.round(Math.max(FEWEST_POINTS, Math.min(chart.plot.node.clientWidth || 600, MOST_POINTS / chosen.length))),
        from: this.range?.[0], to: this.range?.[1],
      });
      if (axis !== settings.axis || logX !== settings.logX) throw new Error("the axis has changed");
      for (const run of requested) chart.curves.set(run, drawn.filter((one) => one.run === run));
      chart.isHeld = false;
      chart.failures = 0;
    } catch {
      chart.isWhole = false;
      chart.failures = (chart.failures ?? 0) + 1;
    }
    chart.took = performance.now() - chart.requestedAt;
    chart.isRequesting = false;
    this.#draw(chart);
    if (chart.failures > 1) {
      // The dashboard has stopped or restarts: keep the curves.
      chart.timer = setTimeout(() => { chart.timer = 0; this.#request(chart); }, RETRY_MILLISECONDS);
    } else if (chart.stale.size || !chart.isWhole) this.#request(chart);
  }

  #draw(chart) {
    if (chart.isHeld) return;
    const { settings, isDark } = this.state;
    const series = [];
    for (const run of this.state.chosen()) {
      for (const one of chart.curves.get(run) ?? []) {
        const end = one.extent[1];
        series.push({ ...one, end, colour: colour(run, isDark), dashes: dashes(run) });
      }
    }
    const { plot } = chart;
    plot.series = series;
    plot.emptyText = chart.isRequesting || !this.state.chosen().length ? "" : chart.curves.size ? "No values yet." : "";
    plot.options = {
      isLogX: settings.logX, isLogY: this.state.isLogY(chart.metric), range: this.range, isSmoothed: settings.smoothing > 0 && !EXACT.has(chart.metric),
      axisText: (value) => axisText(value, settings.axis), positionText: (value) => positionText(value, settings.axis),
      unitOf: (end) => (settings.axis === "hours" && end < 2 ? 1 / 60 : 1),
    };
    plot.redraw();
  }
}

/** The decay for a slider position: finer towards 1. */
export function weightOf(position) {
  return position <= 0 ? 0 : 1 - 10 ** (-3 * (position / 100));
}

function axisText(value, axis) {
  if (axis === "hours") return value < 1 - 1e-9 ? `${short(value * 60, 3)} min` : `${short(value, 3)} h`;
  return short(value, 4);
}

function positionText(value, axis) {
  if (axis === "steps") return `Step ${whole(value)}`;
  return axis === "tokens" ? `${short(value, 5)} tokens` : duration(value * 3600);
}
