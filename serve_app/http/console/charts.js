// Lines over the last quarter of an hour, up to now. A value is null where there is none: the line ends there.
const LEFT = 40, RIGHT = 6, TOP = 8, BOTTOM = 18, HEIGHT = 132;
const STEPS_S = [15, 30, 60, 120, 300];
const SVG = "http://www.w3.org/2000/svg";

const digits = (value) => value === null || value === undefined ? "-"
  : value === 0 ? "0" : value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toPrecision(2);

function made(tag, fields, parent) {
  const one = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(fields)) one.setAttribute(key, value);
  parent.append(one);
  return one;
}
function set(node, text) { if (node.textContent !== text) node.textContent = text; }
function clock(time_s, step_s) {
  return new Date(1000 * time_s).toLocaleTimeString([], step_s % 60 ? {} : { hour: "2-digit", minute: "2-digit" });
}
// The least of 1, 2, 5 times a power of ten that is not below a value.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= value * 0.999);
}

export class Chart {
  constructor(id) {
    this.host = document.getElementById(id);
    this.name = this.host.parentNode.querySelector("h2").textContent;
    this.svg = made("svg", { role: "img" }, this.host);
    this.grid = [0, 0.5, 1].map((share) => ({ share,
      line: made("line", { class: "grid", x1: LEFT }, this.svg),
      text: made("text", { x: LEFT - 5, "text-anchor": "end" }, this.svg) }));
    this.ticks = [...Array(6)].map(() => made("text", { y: HEIGHT - 4, "text-anchor": "middle" }, this.svg));
    this.cursor = made("line", { class: "grid", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }, this.svg);
    this.lines = [];
    this.legend = document.createElement("div");
    this.legend.className = "legend";
    this.when = this.legend.appendChild(document.createElement("span"));
    this.host.append(this.legend);
    this.width = this.host.clientWidth;
    new ResizeObserver(() => { this.width = this.host.clientWidth; this.draw(); }).observe(this.host);
    this.svg.addEventListener("pointermove", (event) => { this.pointer = event.offsetX; this.draw(); });
    this.svg.addEventListener("pointerleave", () => { this.pointer = undefined; this.draw(); });
  }

  // times: seconds, evenly spaced; series: {name, values}; newest: place of the newest value that is whole.
  show(times, series, now_s, newest) {
    Object.assign(this, { times, series, now_s, newest });
    this.draw();
  }

  draw() {
    if (!this.times || !this.width) return;
    const { times, now_s, width } = this, first_s = Math.min(times[0], now_s - 60);
    let most = 0;
    for (const one of this.series) for (const value of one.values) if (value > most) most = value;
    const top = roundUp(most || 1), high = HEIGHT - BOTTOM - TOP;
    const x = (time_s) => LEFT + (width - LEFT - RIGHT) * (time_s - first_s) / (now_s - first_s);
    const y = (value) => TOP + high * (1 - value / top);
    for (const { share, line, text } of this.grid) {
      for (const key of ["y1", "y2"]) line.setAttribute(key, y(share * top));
      line.setAttribute("x2", width - RIGHT);
      text.setAttribute("y", y(share * top) + 4);
      set(text, String(Number((share * top).toPrecision(2))));
    }
    const step_s = STEPS_S.find((one) => (now_s - first_s) / one <= Math.max(1, Math.floor(width / 110))) || 600;
    this.ticks.forEach((text, i) => {
      const time_s = (Math.floor(now_s / step_s) - i) * step_s, at = x(time_s);
      const fits = at >= LEFT + 10 && at <= width - 24;
      text.setAttribute("x", fits ? at : 0);
      set(text, fits ? clock(time_s, step_s) : "");
    });
    const place = this.place(x);
    this.series.forEach((one, i) => this.line(one, i, x, y, place));
    while (this.lines.length > this.series.length) for (const node of Object.values(this.lines.pop())) node.remove();
    const said = this.series.map((one) => `${one.name} ${digits(one.values[this.newest])}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.name}: ${said}`);
  }

  // Place of the values that the legend shows: under the pointer, or the newest.
  place(x) {
    const pointed = this.pointer !== undefined && this.times.length > 1;
    this.cursor.setAttribute("visibility", pointed ? "visible" : "hidden");
    if (!pointed) { set(this.when, ""); return this.newest; }
    const spacing = x(this.times[1]) - x(this.times[0]);
    const at = Math.min(Math.max(Math.round((this.pointer - x(this.times[0])) / spacing), 0), this.times.length - 1);
    for (const key of ["x1", "x2"]) this.cursor.setAttribute(key, x(this.times[at]));
    set(this.when, clock(this.times[at], 1));
    return at;
  }

  line({ name, values }, i, x, y, place) {
    if (!this.lines[i]) {
      const label = this.legend.appendChild(document.createElement("span"));
      label.className = `s${i % 6}`;
      label.append(document.createElement("i"), "");
      this.lines[i] = { path: made("path", { class: `s${i % 6}` }, this.svg), label };
    }
    const { path, label } = this.lines[i];
    let drawn = "";
    values.forEach((value, at) => {
      if (value === null) return;
      const alone = (values[at - 1] ?? null) === null;
      drawn += `${alone ? "M" : "L"}${x(this.times[at]).toFixed(1)},${y(value).toFixed(1)}`;
      // A lone point is a line of no length, which round caps make visible.
      if (alone && (values[at + 1] ?? null) === null) drawn += "h0.01";
    });
    path.setAttribute("d", drawn);
    const text = `${name} ${digits(values[place])}`;
    if (label.lastChild.data !== text) label.lastChild.data = text;
  }
}
