// Grid lines, and the transformation of an axis.

/** About `count` round numbers between two values. */
export function linear(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough) ?? 10 * power;
  const ticks = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number += 1) ticks.push(number * step);
  return ticks;
}

/** Powers of ten between two values, with their multiples by 2 and 5 if there are few. */
export function logarithmic(low, high, count) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const decades = last - first;
  if (high / low < 4) return linear(low, high, count);
  const every = Math.max(1, Math.ceil(decades / Math.max(1, count)));
  const parts = decades <= count / 2 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = first; power <= last; power += every) for (const part of parts) ticks.push(part * 10 ** power);
  return ticks.filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

/** Maps values to pixels, and back with `back`. */
export function scale(low, high, from, to, isLog) {
  const raise = isLog ? Math.log10 : (value) => value;
  const [start, end] = [raise(low), raise(high)];
  const factor = (to - from) / (end - start || 1);
  const pixelOf = isLog
    ? (value) => (value > 0 ? from + (Math.log10(value) - start) * factor : NaN)
    : (value) => from + (value - start) * factor;
  pixelOf.back = (pixel) => {
    const value = start + (pixel - from) / factor;
    return isLog ? 10 ** value : value;
  };
  return pixelOf;
}
