// What the page is drawn from, the JSON in #data, and its x axis: step, wall clock, samples or FLOPs. The page's scripts are
// one module, joined in the order of `SCRIPTS` in html.py: what one file declares the next may use, and nothing else sees it.
let data, launches, clocks, begin, end, unit, seconds, AXES;
const AMBER = "#b07b17", ALARM = "#d0453f", VIOLET = "#8a57c0";
const state = { axis: "step", channel: null, panels: [], log: null, smooth: 0, zoom: new Map() }; // what the reader chose; it outlives new data
const plots = new Map(); // element -> draw function
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const grey = () => css("--gone"); // what was abandoned steps back, on either paper
function take(fresh) {
  data = fresh;
  launches = new Map(data.launches.map((l) => [l.number, l]));
  clocks = new Map(data.clocks.map((c) => [c.launch, c]));
  begin = Math.min(...data.clocks.flatMap((c) => c.time[1].slice(0, 1)), Infinity);
  end = Math.max(...data.clocks.flatMap((c) => c.time[1].slice(-1)), -Infinity);
  [unit, seconds] = [["s", 1], ["min", 60], ["h", 3600], ["d", 86400]].findLast(([, size]) => end - begin >= 3 * size) || ["s", 1];
  AXES = {
    step: "step", time: `wall clock (${unit})`, samples: "samples",
    flops: data.flopsEstimated ? "FLOPs (6 × parameters × tokens)" : "FLOPs",
  };
}
take(JSON.parse(document.getElementById("data").textContent));

// ---- the x axis -----------------------------------------------------------------------------------------------------
const has = (axis) => axis === "step" || data.clocks.some((c) => c[axis] && c[axis][0].length > 1);

function interpolate([xs, ys], x) {
  if (!xs.length) return null;
  let low = 0, high = xs.length - 1;
  if (x <= xs[0]) return ys[0];
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low] || 1);
}

function place(launch, step) {
  if (state.axis === "step" || step === null) return step;
  const table = clocks.get(launch)?.[state.axis];
  if (!table) return null;
  const value = interpolate(table, step);
  return state.axis === "time" && value !== null ? (value - begin) / seconds : value;
}
const placeAll = (launch, steps) => (state.axis === "step" ? steps : steps.map((s) => place(launch, s)));
const owner = (mark) => mark.launch ?? data.launches[0]?.number ?? null;
