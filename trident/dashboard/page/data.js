// Requests to the server, and its events.

export async function get(path, query = {}, signal = undefined) {
  const response = await fetch(address(path, query), { signal, cache: "no-store" });
  if (!response.ok) throw new Error((await response.json()).error || response.statusText);
  return response.json();
}

/** The curves of a metric: for each run, one of training and one per evaluation group. */
export async function curves(query, signal) {
  const response = await fetch(address("/api/curves", query), { signal, cache: "no-store" });
  if (!response.ok) throw new Error((await response.json()).error || response.statusText);
  return decoded(await response.arrayBuffer());
}

/** Decodes a length, a JSON header, then the numbers of each curve: positions as doubles, three rows of floats. */
export function decoded(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const entries = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  let offset = 4 + length;
  for (const entry of entries) {
    const { count } = entry;
    entry.x = new Float64Array(buffer, offset, count);
    offset += 8 * count;
    for (const name of ["low", "high", "line"]) {
      entry[name] = new Float32Array(buffer, offset, count);
      offset += 4 * count;
    }
    offset += 4 * (count % 2);
  }
  return entries;
}

/** Follows the runs while the page is visible. */
export function follow(onRuns, onState) {
  let source = null;
  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource("/api/events");
    source.addEventListener("open", () => onState("live"));
    source.addEventListener("error", () => onState("lost"));
    source.addEventListener("runs", (event) => onRuns(JSON.parse(event.data)));
  };
  const close = () => { source?.close(); source = null; };
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);
  open();
}

function address(path, query) {
  const known = Object.entries(query).filter(([, value]) => value !== undefined && value !== null);
  const text = new URLSearchParams(known.map(([name, value]) => [name, String(value)])).toString();
  return text ? `${path}?${text}` : path;
}
