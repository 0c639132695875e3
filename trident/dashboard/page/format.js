// Formats numbers, times, names and colours.

const UNITS = [[1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];

/** A short number: 12.3k, 4.56B, 0.00012. */
export function short(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(digits - 1).replace(/\.?0*e-/, "e−").replace("-", "−");
  for (const [unit, letter] of UNITS) {
    if (size >= unit * 10 || (unit > 1e3 && size >= unit)) return plain(value / unit, Math.min(digits, 3)) + letter;
  }
  return plain(value, digits);
}

function plain(value, digits) {
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

/** An integer with separators. */
export function whole(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return seconds < 600 ? `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s` : `${minutes} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${(minutes / 1440).toFixed(1)} days`;
}

/** An approximate duration. */
export function about(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["bytes", "kB", "MB", "GB", "TB", "PB"];
  let number = 0;
  while (count >= 1000 && number < units.length - 1) { count /= 1000; number += 1; }
  return `${Number(count.toPrecision(3))} ${units[number]}`;
}

export function dateTime(at) {
  if (!at) return "";
  const date = new Date(at * 1000);
  const pad = (value) => String(value).padStart(2, "0");
  const clock = `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${clock}`;
}

const KNOWN = {
  lm_loss: ["Loss", "nats per token"],
  learning_rate: ["Learning rate", ""],
  gradient_norm: ["Gradient norm", "before clipping"],
  weight_norm: ["Weight norm", ""],
  tokens_per_second: ["Throughput", "tokens per second"],
  samples_per_second: ["Samples", "per second"],
  seconds_per_iteration: ["Step time", "seconds"],
  teraflops_per_device: ["Compute", "TFLOP/s per device"],
  gigaflops_without_embeddings: ["Total compute", "GFLOPs without embeddings"],
  model_flops_utilization_ratio: ["Model FLOPs utilization", "fraction of the device's peak"],
  data_wait_seconds: ["Waiting for data", "seconds per step"],
  communication_seconds: ["Communication", "seconds per step"],
  bubble_ratio: ["Pipeline bubble", "fraction of a step"],
  memory_bytes: ["Memory", "bytes, maximum over ranks"],
  global_batch_size: ["Global batch size", "samples"],
  consumed_samples: ["Consumed samples", ""],
  loss_scale: ["Loss scale", "fp16"],
  skipped_iterations: ["Skipped updates", ""],
  nan_iterations: ["Non-finite steps", ""],
  empty_iterations: ["Steps without loss tokens", ""],
  z_loss: ["Z-loss", ""],
};

/** The title of a metric, and its unit. */
export function titled(metric) {
  if (KNOWN[metric]) return KNOWN[metric];
  const title = metric.replace(/_/g, " ");
  const unit = /(seconds|bytes|ratio)$/.exec(title);
  return [title.charAt(0).toUpperCase() + title.slice(1), unit ? "" : ""];
}

const HUES = [258, 48, 150, 318, 22, 205, 92, 350, 285, 125];
const DASHES = [[], [7, 3], [2, 2.5]];

/** The colour of a run in the current theme; the first ten are most distinct. */
export function colour(number, isDark) {
  const index = number - 1;
  const round = Math.floor(index / HUES.length);
  const hue = (HUES[index % HUES.length] + round * 17) % 360;
  const lightness = (isDark ? 0.76 : 0.56) + (round % 3 === 1 ? -0.09 : round % 3 === 2 ? 0.08 : 0);
  return `oklch(${lightness.toFixed(2)} ${isDark ? 0.14 : 0.17} ${hue})`;
}

export function dashes(number) {
  return DASHES[Math.floor((number - 1) / HUES.length) % DASHES.length];
}

/** Creates an element with attributes and children; text is never parsed as markup. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") made.className = value;
    else if (key === "color") made.style.setProperty("--color", value);
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key in made && typeof value !== "string") made[key] = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
