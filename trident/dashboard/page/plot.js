// One chart: curves on one canvas, the pointer's overlay on another, so that pointer moves redraw no curve.

import { element, short } from "./format.js";
import { linear, logarithmic, scale } from "./ticks.js";

const MARGIN = { left: 58, right: 12, top: 8, bottom: 24 };
const POINTS_OF_A_PATH = 32; // software rendering is faster with many short paths than with a long one
const MOST_BANDS = 8;
const MOST_NAMED = 12;
const FEWEST_DRAGGED_PIXELS = 6;

export class Plot {
  /**
   * @param {object} callbacks onZoom(range or null), onPoint(value or null), name(run number).
   */
  constructor(callbacks) {
    this.callbacks = callbacks;
    this.series = [];
    this.options = { isLogX: false, isLogY: false, range: null, isSmoothed: false, axisText: (value) => short(value) };
    this.pointed = null;
    this.highlighted = null;
    this.dragged = null;
    this.base = element("canvas", { "aria-hidden": "true" });
    this.above = element("canvas", { tabindex: "0", role: "img" });
    this.box = element("div", { class: "hover", hidden: true });
    this.message = element("div", { class: "message" });
    this.node = element("div", { class: "plot" }, this.base, this.above, this.message, this.box);
    this.isDirty = true;
    this.drawSeconds = 0;
    new ResizeObserver(() => this.redraw()).observe(this.node);
    this.#listen();
  }

  /** Draws at the next frame. */
  redraw() {
    this.isDirty = true;
    this.#schedule();
  }

  point(value) {
    this.pointed = value;
    this.#schedule();
  }

  highlight(run) {
    this.highlighted = run;
    this.#schedule();
  }

  #schedule() {
    if (this.scheduled) return;
    this.scheduled = requestAnimationFrame(() => {
      this.scheduled = 0;
      const began = performance.now();
      if (this.isDirty) this.#drawBase();
      this.#drawAbove();
      this.drawSeconds = (performance.now() - began) / 1000;
    });
  }

  #drawBase() {
    this.isDirty = false;
    const pen = this.#prepare(this.base, true);
    if (!pen) return;
    const { isLogX, isLogY } = this.options;
    const bounds = this.#bounds();
    this.frame = null;
    this.message.textContent = bounds ? "" : this.emptyText ?? "";
    if (!bounds) return;
    const [x0, x1, y0, y1] = bounds;
    const width = this.width - MARGIN.right;
    const height = this.height - MARGIN.bottom;
    this.frame = {
      x: scale(x0, x1, MARGIN.left, width, isLogX),
      y: scale(y0, y1, height, MARGIN.top, isLogY),
      bounds,
    };
    this.#drawGrid(pen, bounds, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(MARGIN.left, MARGIN.top - 1, width - MARGIN.left, height - MARGIN.top + 2);
    pen.clip();
    pen.lineJoin = "bevel";
    const runs = new Set(this.series.map((one) => one.run)).size;
    const hasBands = this.options.isSmoothed && runs <= MOST_BANDS;
    if (hasBands) for (const one of this.series) if (!one.group) this.#drawBand(pen, one, runs > 3 ? 0.11 : 0.2);
    for (const one of this.series) this.#drawCurve(pen, one, runs > 30 ? 1 : 1.6);
    pen.restore();
  }

  #drawGrid(pen, [x0, x1, y0, y1], width, height) {
    const { isLogX, isLogY, axisText } = this.options;
    const style = getComputedStyle(this.node);
    pen.font = `11.5px ${style.fontFamily}`;
    pen.fillStyle = style.getPropertyValue("--muted");
    pen.strokeStyle = style.getPropertyValue("--grid");
    pen.lineWidth = 1;
    const across = Math.max(2, Math.floor((width - MARGIN.left) / 90));
    const up = Math.max(2, Math.floor((height - MARGIN.top) / 42));
    pen.beginPath();
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const value of (isLogY ? logarithmic : linear)(y0, y1, up)) {
      const y = Math.round(this.frame.y(value)) + 0.5;
      if (y < MARGIN.top - 2 || y > height + 2) continue;
      pen.moveTo(MARGIN.left, y);
      pen.lineTo(width, y);
      pen.fillText(short(value, 4), MARGIN.left - 8, y);
    }
    pen.textBaseline = "top";
    const unit = this.options.unitOf?.(x1) ?? 1;
    for (const value of (isLogX ? logarithmic : linear)(x0 / unit, x1 / unit, across).map((tick) => tick * unit)) {
      const x = Math.round(this.frame.x(value)) + 0.5;
      const text = axisText(value);
      const half = pen.measureText(text).width / 2;
      pen.textAlign = x + half > this.width ? "right" : "center";
      pen.moveTo(x, MARGIN.top);
      pen.lineTo(x, height);
      pen.fillText(text, pen.textAlign === "right" ? this.width - 2 : x, height + 7);
    }
    pen.stroke();
  }

  /** Draws the range of the values behind a smoothed curve as an area. */
  #drawBand(pen, one, opacity) {
    const { x, y } = this.frame;
    const { count } = one;
    if (count < 2) return;
    pen.beginPath();
    for (let index = 0; index < count; index += 1) pen.lineTo(x(one.x[index]), this.#clamped(y(one.high[index])));
    for (let index = count - 1; index >= 0; index -= 1) pen.lineTo(x(one.x[index]), this.#clamped(y(one.low[index])));
    pen.globalAlpha = opacity;
    pen.fillStyle = one.colour;
    pen.fill();
    pen.globalAlpha = 1;
  }

  #drawCurve(pen, one, thickness) {
    const { x, y } = this.frame;
    const { count, low, high, line } = one;
    pen.strokeStyle = one.colour;
    pen.fillStyle = one.colour;
    pen.lineWidth = thickness;
    pen.setLineDash(one.group ? [5, 4] : one.dashes);
    pen.beginPath();
    let isOpen = false;
    let previous = 0;
    let drawn = 0;
    const to = (across, up) => {
      if (Number.isNaN(up)) { isOpen = false; return; }
      if (isOpen) pen.lineTo(across, up); else pen.moveTo(across, up);
      isOpen = true;
      previous = up;
      drawn += 1;
      if (drawn % POINTS_OF_A_PATH) return;
      pen.stroke();
      pen.beginPath();
      pen.moveTo(across, up);
    };
    if (this.options.isSmoothed) {
      for (let index = 0; index < count; index += 1) to(x(one.x[index]), this.#clamped(y(line[index])));
    } else {
      for (let index = 0; index < count; index += 1) {
        const across = x(one.x[index]);
        const bottom = this.#clamped(y(low[index]));
        if (low[index] === high[index]) { to(across, bottom); continue; }
        const top = this.#clamped(y(high[index]));
        const isBottomFirst = Math.abs(bottom - previous) < Math.abs(top - previous);
        to(across, isBottomFirst ? bottom : top);
        to(across, isBottomFirst ? top : bottom);
      }
    }
    pen.stroke();
    pen.setLineDash([]);
    if (one.group || count === 1) {
      const radius = one.group ? 3 : 2.5;
      for (let index = 0; index < count && count <= 200; index += 1) {
        pen.beginPath();
        pen.arc(x(one.x[index]), y(line[index]), radius, 0, 7);
        pen.fill();
      }
    }
  }

  /** Clamps a pixel: far outside, canvas loses precision and speed. */
  #clamped(pixel) {
    return pixel < -4000 ? -4000 : pixel > 4000 ? 4000 : pixel;
  }

  #drawAbove() {
    const isBlank = this.highlighted === null && this.pointed === null && !this.dragged;
    if (isBlank && this.isAboveBlank) return;
    const pen = this.#prepare(this.above);
    this.isAboveBlank = isBlank;
    this.box.hidden = true;
    if (!pen || !this.frame || isBlank) return;
    const style = getComputedStyle(this.node);
    const height = this.height - MARGIN.bottom;
    const one = this.highlighted === null ? [] : this.series.filter((curve) => curve.run === this.highlighted);
    if (one.length) {
      pen.globalAlpha = 0.72;
      pen.fillStyle = style.getPropertyValue("--card");
      pen.fillRect(MARGIN.left, 0, this.width - MARGIN.left, height);
      pen.globalAlpha = 1;
      pen.save();
      pen.beginPath();
      pen.rect(MARGIN.left, MARGIN.top - 1, this.width - MARGIN.right - MARGIN.left, height - MARGIN.top + 2);
      pen.clip();
      for (const curve of one) this.#drawCurve(pen, curve, 2.4);
      pen.restore();
    }
    if (this.dragged) {
      const [from, to] = this.dragged;
      pen.fillStyle = style.getPropertyValue("--accent");
      pen.globalAlpha = 0.14;
      pen.fillRect(Math.min(from, to), MARGIN.top, Math.abs(to - from), height - MARGIN.top);
      pen.globalAlpha = 1;
      return;
    }
    if (this.pointed === null) return;
    const across = this.frame.x(this.pointed);
    if (!(across >= MARGIN.left - 1 && across <= this.width - MARGIN.right + 1)) return;
    pen.strokeStyle = style.getPropertyValue("--muted");
    pen.lineWidth = 1;
    pen.setLineDash([3, 3]);
    pen.beginPath();
    pen.moveTo(Math.round(across) + 0.5, MARGIN.top);
    pen.lineTo(Math.round(across) + 0.5, height);
    pen.stroke();
    pen.setLineDash([]);
    this.#drawValues(pen, across);
  }

  /** Draws a dot on each curve at the pointer, and a table of values if the pointer is on this chart. */
  #drawValues(pen, across) {
    const near = this.values(this.pointed);
    for (const { curve, index, value } of near.slice(0, 200)) {
      pen.fillStyle = curve.colour;
      pen.beginPath();
      pen.arc(this.frame.x(curve.x[index]), this.frame.y(value), 3, 0, 7);
      pen.fill();
    }
    if (!this.isPointedHere || !near.length) return;
    const rows = near.slice(0, MOST_NAMED).map(({ curve, value }) =>
      element("tr", {}, element("td", {}, element("span", { class: "swatch", color: curve.colour })),
        element("td", {}, this.callbacks.name(curve.run) + (curve.group ? ` · ${curve.group}` : "")),
        element("td", {}, element("b", {}, short(value, 5)))));
    if (near.length > MOST_NAMED) {
      rows.push(element("tr", {}, element("td"), element("td", {}, `and ${near.length - MOST_NAMED} more`), element("td")));
    }
    this.box.replaceChildren(element("b", {}, this.options.positionText(this.pointed)), element("table", {}, ...rows));
    this.box.hidden = false;
    const isRight = across > this.width / 2;
    this.box.style.left = isRight ? "auto" : `${across + 12}px`;
    this.box.style.right = isRight ? `${this.width - across + 12}px` : "auto";
  }

  /** The value of each curve nearest to a position on the axis, closest to the pointer first. */
  values(at) {
    const values = [];
    for (const curve of this.series) {
      if (!curve.count || at < curve.x[0] || (curve.group === "" && at > curve.end)) continue;
      let low = 0;
      let high = curve.count - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (curve.x[middle] <= at) low = middle; else high = middle - 1;
      }
      if (low + 1 < curve.count && curve.x[low + 1] - at < at - curve.x[low]) low += 1;
      const value = this.options.isSmoothed || curve.low[low] === curve.high[low] ? curve.line[low] : (curve.low[low] + curve.high[low]) / 2;
      if (Number.isFinite(value)) values.push({ curve, index: low, value });
    }
    const up = this.pointedHeight;
    const far = ({ value }) => (up === undefined ? value : Math.abs(this.frame.y(value) - up));
    return values.sort((one, other) => far(one) - far(other));
  }

  /** The bounds of the selected range, or of all points, with vertical padding. */
  #bounds() {
    const { isLogX, isLogY, range, isSmoothed } = this.options;
    let [x0, x1] = range ?? [Infinity, -Infinity];
    if (!range) {
      for (const { extent, count } of this.series) {
        if (!count) continue;
        x0 = Math.min(x0, extent[0]);
        x1 = Math.max(x1, extent[1]);
      }
    }
    let [y0, y1] = [Infinity, -Infinity];
    const include = (value) => {
      if (!Number.isFinite(value) || (isLogY && value <= 0)) return;
      if (value < y0) y0 = value;
      if (value > y1) y1 = value;
    };
    for (const one of this.series) {
      for (let index = 0; index < one.count; index += 1) {
        if (one.x[index] < x0 || one.x[index] > x1) continue;
        if (isSmoothed) { include(one.line[index]); continue; }
        include(one.low[index]);
        include(one.high[index]);
      }
    }
    if (!(x1 >= x0) || !(y1 >= y0)) return null;
    if (x0 === x1) [x0, x1] = isLogX ? [x0 / 2, x1 * 2] : [x0 - 1, x1 + 1];
    if (y0 === y1) [y0, y1] = isLogY ? [y0 / 2, y1 * 2] : [y0 - Math.abs(y0) * 0.1 - 1e-12, y1 + Math.abs(y1) * 0.1 + 1e-12];
    else if (isLogY) { const padding = (y1 / y0) ** 0.04; [y0, y1] = [y0 / padding, y1 * padding]; }
    else { const padding = (y1 - y0) * 0.04; [y0, y1] = [y0 >= 0 && y0 < padding * 4 ? Math.min(y0, 0) || 0 : y0 - padding, y1 + padding]; }
    return [x0, x1, y0, y1];
  }

  /** Resizes a canvas and returns its context; opaque canvases are cheaper to composite. */
  #prepare(canvas, isOpaque = false) {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.node.clientWidth;
    this.height = this.node.clientHeight;
    const [across, down] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (!across || !down) return null;
    if (canvas.width !== across || canvas.height !== down) { canvas.width = across; canvas.height = down; }
    const pen = canvas.getContext("2d", { alpha: !isOpaque });
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    if (isOpaque) {
      pen.fillStyle = getComputedStyle(this.node).getPropertyValue("--card");
      pen.fillRect(0, 0, this.width, this.height);
    } else pen.clearRect(0, 0, this.width, this.height);
    return pen;
  }

  #listen() {
    const offset = (event) => event.clientX - this.above.getBoundingClientRect().left;
    this.above.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.frame || event.pointerType === "touch") return;
      this.above.setPointerCapture(event.pointerId);
      this.dragged = [this.#clampedX(offset(event)), this.#clampedX(offset(event))];
    });
    this.above.addEventListener("pointermove", (event) => {
      if (!this.frame) return;
      if (this.dragged) { this.dragged[1] = this.#clampedX(offset(event)); this.#schedule(); return; }
      this.pointedHeight = event.clientY - this.above.getBoundingClientRect().top;
      this.#pointAt(this.frame.x.back(this.#clampedX(offset(event))));
    });
    this.above.addEventListener("pointerup", () => {
      const [from, to] = this.dragged ?? [0, 0];
      this.dragged = null;
      this.#schedule();
      if (this.frame && Math.abs(to - from) >= FEWEST_DRAGGED_PIXELS) {
        this.callbacks.onZoom([from, to].sort((one, other) => one - other).map((pixel) => this.frame.x.back(pixel)));
      }
    });
    this.above.addEventListener("pointerleave", () => { if (!this.dragged) this.#leave(); });
    this.above.addEventListener("pointercancel", () => { this.dragged = null; this.#leave(); });
    this.above.addEventListener("dblclick", () => this.callbacks.onZoom(null));
    this.above.addEventListener("blur", () => this.#leave());
    this.above.addEventListener("wheel", (event) => {
      if (!(event.ctrlKey || event.metaKey) || !this.frame) return;
      event.preventDefault();
      this.#zoomBy(Math.exp(event.deltaY * 0.004), this.#clampedX(offset(event)));
    }, { passive: false });
    this.above.addEventListener("keydown", (event) => this.#onKey(event));
  }

  /** Arrow keys move along the curves, + and - zoom, Escape resets the zoom. */
  #onKey(event) {
    if (!this.frame) return;
    const width = this.width - MARGIN.right;
    const at = this.pointed === null ? (MARGIN.left + width) / 2 : this.frame.x(this.pointed);
    const move = { ArrowLeft: -8, ArrowRight: 8, Home: -1e9, End: 1e9 }[event.key];
    if (move !== undefined) {
      this.pointedHeight = undefined;
      this.#pointAt(this.frame.x.back(this.#clampedX(at + move)));
    } else if (event.key === "+" || event.key === "=") this.#zoomBy(0.6, at);
    else if (event.key === "-") this.#zoomBy(1 / 0.6, at);
    else if (event.key === "Escape" || event.key === "0") this.callbacks.onZoom(null);
    else return;
    event.preventDefault();
  }

  #zoomBy(factor, at) {
    const [left, right] = [MARGIN.left, this.width - MARGIN.right];
    this.callbacks.onZoom([this.frame.x.back(at - (at - left) * factor), this.frame.x.back(at + (right - at) * factor)]);
  }

  #pointAt(value) {
    this.isPointedHere = true;
    this.callbacks.onPoint(value);
  }

  #leave() {
    this.isPointedHere = false;
    this.callbacks.onPoint(null);
  }

  #clampedX(pixel) {
    return Math.min(Math.max(pixel, MARGIN.left), this.width - MARGIN.right);
  }
}
