"use strict";
// The trajectory viewer (analysis/viewer.py makes its data). Text reaches the page as text nodes only: it is hostile.
// The address's fragment drives the same controls: #status=hack&turn=2&open=17
(async () => {
  const ROW = 26, host = document.getElementById("viewer");
  const make = (tag, name, text) => {
    const element = document.createElement(tag);
    if (name) element.className = name;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const shown = (text) => String(text ?? "").replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/g,
    (c, at, all) => {
      const code = c.charCodeAt(0), next = all.charCodeAt(at + 1), before = all.charCodeAt(at - 1);
      if (code >= 0xd800 && code < 0xdc00 && next >= 0xdc00 && next < 0xe000) return c;
      if (code >= 0xdc00 && code < 0xe000 && before >= 0xd800 && before < 0xdc00) return c;
      return "\\u" + code.toString(16).padStart(4, "0");
    });
  const number = (value, digits = 2) => typeof value === "number" ? value.toFixed(digits) : "—";

  async function unpack(name) {
    const text = atob(document.getElementById("turns-" + name).textContent);
    const bytes = Uint8Array.from(text, (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }
  if (typeof DecompressionStream === "undefined") {
    host.replaceChildren(make("p", "lead", "This browser is too old for the viewer (no DecompressionStream)."));
    return;
  }
  const { columns, words, piece } = await unpack("index");
  const total = columns.turn.length, pieces = new Map();
  const word = (kind, i) => words[kind][columns[kind][i]];
  const details = async (i) => {
    const at = Math.floor(i / piece);
    if (!pieces.has(at)) pieces.set(at, unpack(at));
    return (await pieces.get(at))[i % piece];
  };

  // ---- controls
  const bar = make("div", "v-bar"), count = make("span", "v-count");
  const controls = {};
  const choice = (name, values) => {
    const select = make("select");
    select.append(new Option("all", ""), ...values.map((value) => new Option(value, value)));
    controls[name] = select;
    const label = make("label", "", name + " ");
    label.append(select);
    bar.append(label);
  };
  const distinct = (values) => [...new Set(values)].sort((a, b) => a - b);
  const problem = make("input");
  problem.placeholder = "part of its name";
  controls.problem = problem;
  const problemLabel = make("label", "", "problem ");
  problemLabel.append(problem);
  bar.append(problemLabel);
  choice("status", [...words.status].sort());
  choice("turn", distinct(columns.turn));
  choice("source", words.source);
  choice("step", distinct(columns.step));
  bar.append(count);

  // ---- the list: only rows in sight exist
  const list = make("div", "v-list"), spacer = make("div"), rows = make("div", "v-rows"), detail = make("div", "v-detail");
  list.tabIndex = 0;
  list.append(spacer, rows);
  const head = make("div", "v-row v-head");
  const titles = ["source", "step", "problem", "sample", "turn", "status", "speedup", "PR", "reward", "advantage", "masks"];
  for (const title of titles) head.append(make("span", "", title));
  host.replaceChildren(bar, head, list, detail);
  let chosen = [], open = -1;

  function row(i) {
    const element = make("div", "v-row" + (i === open ? " v-open" : ""));
    const cells = [
      word("source", i), columns.step[i], shown(word("problem", i)), columns.sample[i], columns.turn[i], "",
      number(columns.speedup[i]), number(columns.ratio[i]), number(columns.reward[i]), number(columns.advantage[i], 3),
      columns.masks[i],
    ];
    for (const cell of cells) element.append(make("span", "", cell));
    element.children[5].append(make("span", "pill " + word("status", i), word("status", i).replaceAll("_", " ")));
    element.dataset.turn = i;
    return element;
  }
  function draw() {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
    const last = Math.min(chosen.length, first + Math.ceil((list.clientHeight || 340) / ROW) + 10);
    rows.style.transform = `translateY(${first * ROW}px)`;
    rows.replaceChildren(...chosen.slice(first, last).map(row));
  }
  function filter() {
    const want = Object.fromEntries(Object.entries(controls).map(([name, control]) => [name, control.value]));
    const text = want.problem.toLowerCase();
    chosen = [];
    for (let i = 0; i < total; i++) {
      if (want.status && word("status", i) !== want.status) continue;
      if (want.turn && columns.turn[i] !== Number(want.turn)) continue;
      if (want.step && columns.step[i] !== Number(want.step)) continue;
      if (want.source && word("source", i) !== want.source) continue;
      if (text && !word("problem", i).toLowerCase().includes(text)) continue;
      chosen.push(i);
    }
    count.textContent = `${chosen.length} of ${total} turns`;
    spacer.style.height = chosen.length * ROW + "px";
    list.scrollTop = 0;
    draw();
  }

  // ---- one turn
  // Lines of b marked "+" where new, "-" where a's are gone: longest common subsequence between equal ends.
  function diff(a, b) {
    const x = a.split("\n"), y = b.split("\n"), result = [];
    let begin = 0, end = 0;
    while (begin < x.length && begin < y.length && x[begin] === y[begin]) begin++;
    while (end < x.length - begin && end < y.length - begin && x[x.length - 1 - end] === y[y.length - 1 - end]) end++;
    const p = x.slice(begin, x.length - end), q = y.slice(begin, y.length - end);
    for (const line of x.slice(0, begin)) result.push([" ", line]);
    if (p.length * q.length > 4e6) {
      for (const line of p) result.push(["-", line]);
      for (const line of q) result.push(["+", line]);
    } else {
      const width = q.length + 1, best = new Uint32Array((p.length + 1) * width);
      for (let i = p.length - 1; i >= 0; i--)
        for (let j = q.length - 1; j >= 0; j--)
          best[i * width + j] = p[i] === q[j] ? best[(i + 1) * width + j + 1] + 1
            : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
      let i = 0, j = 0;
      while (i < p.length || j < q.length) {
        if (i < p.length && j < q.length && p[i] === q[j]) { result.push([" ", p[i]]); i++; j++; }
        else if (j >= q.length || (i < p.length && best[(i + 1) * width + j] >= best[i * width + j + 1])) result.push(["-", p[i++]]);
        else result.push(["+", q[j++]]);
      }
    }
    for (const line of x.slice(x.length - end)) result.push([" ", line]);
    return result;
  }
  function fold(title, content, opened) {
    const element = make("details"), summary = make("summary", "", title);
    element.open = opened;
    element.append(summary, content);
    return element;
  }
  function profile(table) {
    const box = make("div", "v-profile"), most = Math.max(...table.map((entry) => entry.time_us || 0), 1e-9);
    for (const entry of table) {
      const line = make("div", entry.own ? "v-own" : "v-foreign");
      const fill = make("span", "v-fill");
      fill.style.width = 240 * (entry.time_us || 0) / most + "px";
      line.append(fill, make("span", "", `${number(entry.time_us)} µs, ${number(entry.count, 0)} x ${shown(entry.name)}`
        + (entry.own ? " (its own)" : "")));
      box.append(line);
    }
    return box;
  }
  async function show(i) {
    open = i;
    draw();
    const one = await details(i);
    const before = columns.turn[i] > 1 ? await details(i - 1) : null; // turns of a trajectory follow each other
    if (open !== i) return;
    const title = `${word("source", i)}, step ${columns.step[i]}: ${shown(word("problem", i))}, sample `
      + `${columns.sample[i]}, turn ${columns.turn[i]}`;
    const facts = make("dl");
    const interval = typeof one.speedup_low === "number" ? ` [${number(one.speedup_low)}, ${number(one.speedup_high)}]` : "";
    for (const [name, value] of [
      ["verdict", word("status", i) + (one.rule ? `: ${one.rule}` : "")],
      ["speedup", number(columns.speedup[i]) + interval + (one.time_kind ? ` (${one.time_kind})` : "")],
      ["reference / candidate, µs", `${number(one.reference_us)} / ${number(one.candidate_us)}`],
      ["profiling ratio", number(columns.ratio[i])],
      ["reward", number(columns.reward[i])],
      ["parts", Object.entries(one.parts || {}).map(([part, value]) => `${part} ${number(value)}`).join(", ") || "—"],
      ["advantage", number(columns.advantage[i], 3)],
      ["masks", columns.masks[i] || "none: the row counts"],
      ["ended by", one.finish],
      ["policy version", one.version],
    ]) {
      const pair = make("div");
      pair.append(make("dt", "", name), make("dd", "", shown(value)));
      facts.append(pair);
    }
    const parts = [make("h3", "", title), facts];
    if (one.message) parts.push(make("p", "message", shown(one.message)));
    if (one.profile && one.profile.length) parts.push(profile(one.profile));
    if (before) {
      const box = make("pre", "v-diff");
      for (const [mark, line] of diff(before.answer, one.answer))
        box.append(make("span", { "+": "v-new", "-": "v-gone", " ": "" }[mark], `${mark} ${shown(line)}\n`));
      parts.push(fold("Difference from the turn before", box, true));
    }
    parts.push(fold("The answer", make("pre", "code", shown(one.answer)), !before));
    const asked = columns.turn[i] > 1 ? "Feedback on the turn before, as the model saw it" : "What the model was asked";
    parts.push(fold(asked, make("pre", "", shown(one.prompt)), columns.turn[i] > 1));
    parts.push(fold("Feedback of the judge on this turn", make("pre", "", shown(one.feedback)), false));
    detail.replaceChildren(...parts);
    detail.dataset.turn = i;
  }

  let waiting = false;
  list.addEventListener("scroll", () => {
    if (!waiting) requestAnimationFrame(() => { waiting = false; draw(); });
    waiting = true;
  });
  rows.addEventListener("click", (event) => {
    const element = event.target.closest("[data-turn]");
    if (element) show(Number(element.dataset.turn));
  });
  list.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !chosen.length) return;
    event.preventDefault();
    const at = Math.min(Math.max(chosen.indexOf(open) + step, 0), chosen.length - 1);
    if ((at + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (at + 1) * ROW - list.clientHeight;
    if (at * ROW < list.scrollTop) list.scrollTop = at * ROW;
    show(chosen[at]);
  });
  for (const control of Object.values(controls)) control.addEventListener("input", filter);
  filter();
  async function follow() {
    const asked = new URLSearchParams(location.hash.slice(1));
    for (const [name, control] of Object.entries(controls))
      if (asked.has(name)) { control.value = asked.get(name); control.dispatchEvent(new Event("input")); }
    if (asked.has("open") && Number(asked.get("open")) < total) await show(Number(asked.get("open")));
  }
  addEventListener("hashchange", follow);
  await follow();
  host.dataset.readyMs = Math.round(performance.now());
})();
