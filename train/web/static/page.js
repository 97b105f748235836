// Keeps a page of runs fresh: asks for facts every two seconds, and puts texts into the places that the server has made.
"use strict";

(() => {
  const EVERY = 2000, SLOWEST = 30000, AWAY = 1800, RESTS = 300;
  const main = document.querySelector("main"), offline = document.getElementById("offline"), lost = offline.textContent;
  const get = (id) => document.getElementById(id), api = document.body.dataset.api;

  // --- texts and rows

  function put(place, value) {
    const text = String(value ?? "");
    if (place.tagName === "INPUT") place.value = text;
    else if (place.tagName === "PROGRESS") place.value = Number(text) || 0;
    else if (place.textContent !== text) place.textContent = text;
    if (place.tagName !== "TH") place.hidden = text === "";
  }

  function fill(element, values, isOwn) {
    const places = (name) => Array.from(element.querySelectorAll(`[data-${name}]`)).filter(isOwn);
    for (const place of places("f")) put(place, values[place.dataset.f]);
    for (const place of places("title")) place.title = values[place.dataset.title] || "";
    for (const place of places("if")) place.hidden = !values[place.dataset.if];
    for (const place of places("href")) {
      if (values[place.dataset.href]) place.setAttribute("href", values[place.dataset.href]);
      else place.removeAttribute("href");
    }
  }

  function list(holder, rows) {
    const template = holder.querySelector(":scope > template"), wanted = new Set(rows.map((one) => one.key));
    const known = new Map(Array.from(holder.querySelectorAll(":scope > [data-key]"), (row) => [row.dataset.key, row]));
    for (const [key, row] of known) if (!wanted.has(key)) row.remove();
    let before = holder.firstElementChild;
    for (const cells of rows) {
      const row = known.get(cells.key) || template.content.firstElementChild.cloneNode(true);
      row.dataset.key = cells.key;
      if (before === row) before = row.nextElementSibling;
      else holder.insertBefore(row, before);
      if (cells.state !== undefined) row.dataset.state = cells.state;
      fill(row, cells, () => true);
    }
  }

  function show(data) {
    const focused = document.activeElement;
    fill(main, data.values, (place) => !place.closest("[data-key]"));
    for (const head of main.querySelectorAll(".head")) head.dataset.state = data.values.state;
    for (const holder of main.querySelectorAll("[data-list]")) list(holder, data.lists[holder.dataset.list] || []);
    for (const part of main.querySelectorAll("[data-has]")) part.hidden = !(data.lists[part.dataset.has] || []).length;
    if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true }); // its row has moved
    if (get("output") && data.ranks) showLog(data);
    if (data.curves) showCurves(data.curves);
    if (data.mark) mark = data.mark;
    seen();
    if (data.values.first !== undefined && !data.values.first === Boolean(main.querySelector(".first"))) location.reload();
  }

  // --- the log: follows while its end is seen, and rests while something in it is selected

  let rank = new URLSearchParams(location.search).get("rank") || get("ranks")?.elements.rank.value; // a new attempt may not have it yet

  function showLog(data) {
    const output = get("output"), select = get("ranks").elements.rank, selected = document.getSelection();
    const ranks = data.ranks.map(String), shown = String(data.rank);
    if (ranks.includes(rank) && shown !== rank) return; // asked before another one was chosen
    const isNew = ranks.length && ranks.join() !== Array.from(select.options, (one) => one.text).join();
    if (isNew) select.replaceChildren(...ranks.map((one) => new Option(one, one)));
    if (ranks.length) select.value = shown;
    const text = data.values.log || output.dataset.none;
    if (!selected.isCollapsed && output.contains(selected.anchorNode)) return;
    put(get("log-of"), data.values.log_of);
    if (output.textContent === text) return;
    const isAtEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 20;
    output.textContent = text;
    if (isAtEnd) output.scrollTop = output.scrollHeight;
  }

  // --- asking

  let wait = EVERY, timer = 0, mark = "", asking = false;

  function address() {
    const query = new URLSearchParams(location.search);
    if (mark) query.set("mark", mark);
    query.set(...(get("ranks") ? ["rank", rank] : ["since", String(Math.floor(since))]));
    return `${api}?${query}`;
  }

  async function ask() {
    clearTimeout(timer);
    if (document.hidden || asking || !api) return;
    let isGone = false;
    asking = true;
    try {
      const answer = await fetch(address(), { headers: { Accept: "application/json" }, signal: AbortSignal.timeout(20000) });
      if (answer.status === 403) return location.reload(); // the login is over
      const data = await answer.json();
      isGone = answer.status === 404;
      if (answer.ok) show(data);
      put(offline, answer.ok ? "" : data.problem ? `${data.problem.replace(/(?<![.?!\u3002])$/, ".")} ${offline.dataset.gone}` : lost);
      wait = answer.ok ? EVERY : SLOWEST;
      // What is no longer so: the state, the buttons, the commands. The curves and the log stay as they were.
      if (isGone) for (const place of main.querySelectorAll(".head [data-f], .head [data-if], [data-has=commands]")) place.hidden = true;
    } catch {
      put(offline, lost);
      wait = Math.min(wait * 2, SLOWEST);
    } finally {
      asking = false;
      if (!isGone) timer = setTimeout(ask, wait);
    }
  }

  // --- the last visit: a time in this browser. A page that is open while nobody is there is no visit

  let since = 0, touched = 0;
  const now = () => Date.now() / 1000, hasNews = Boolean(main.querySelector("[data-list=news]"));
  const store = (key, value) => attempt(() => localStorage.setItem(key, String(value)));
  const stored = (key) => Number(attempt(() => localStorage.getItem(key))) || 0;
  const seen = () => hasNews && document.hasFocus() && now() - touched < RESTS && store("train-seen", now());

  function arrive() {
    const last = stored("train-seen");
    if (hasNews && !document.hidden && last && now() - last > AWAY) store("train-since", last);
    since = stored("train-since");
  }

  function touch() {
    if (now() - touched > RESTS) arrive();
    touched = now();
  }

  // --- curves

  const showCurves = (() => {
    const panels = new Map(), controls = get("controls"), { axis, log, range } = controls?.elements ?? {};
    const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]], SIGNS = ["\u2500\u2500", "- -", "\u00b7\u00b7\u00b7", "\u2500\u00b7"], COLOURS = ["--line", "--wait", "--good", "--bad"];
    let runs = [], zoom = null, source = null; // {min, max} of all curves; the curve it was selected on
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const isNone = (value) => value === null || value === undefined, tenths = (value) => Math.round(value * 10) / 10;
    const number = (value) => (isNone(value) ? "-" : String(Number(value.toPrecision(4))));
    const bytes = (value) => (isNone(value) ? "-" : `${(value / 2 ** 30).toFixed(2)} GiB`);
    const seconds = (value) =>
      isNone(value) ? "-" : value < 90 ? `${tenths(value)} s` : value < 5400 ? `${tenths(value / 60)} min` : `${tenths(value / 3600)} h`;

    function tables(kind, name) {
      const isTime = axis.value === "time", isLog = log.checked;
      const found = runs.filter((run) => Object.hasOwn(run[kind].figures, name));
      const all = found.map((run) => {
        const across = isTime ? run[kind].time : run[kind].step, last = new Map();
        run[kind].figures[name].forEach((value, place) => last.set(across[place], isLog && value <= 0 ? null : value));
        const sorted = [...last.keys()].sort((one, other) => one - other);
        return [sorted, sorted.map((at) => last.get(at))];
      });
      return { found, data: all.length > 1 ? uPlot.join(all) : all[0] };
    }

    function marks(plot) {
      const isTime = axis.value === "time", context = plot.ctx;
      let said = -Infinity;
      context.save();
      context.textAlign = "left";
      context.strokeStyle = context.fillStyle = colour("--wait");
      context.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
      for (const run of runs) {
        for (const [step, hasDied] of run.marks) {
          const place = run.line.step.findLastIndex((one) => one <= step);
          const at = isTime ? (place < 0 ? 0 : run.line.time[place]) : step;
          if (at < plot.scales.x.min || at > plot.scales.x.max) continue;
          const x = Math.round(plot.valToPos(at, "x", true));
          context.beginPath();
          context.moveTo(x, plot.bbox.top);
          context.lineTo(x, plot.bbox.top + plot.bbox.height);
          context.stroke();
          if (x - said < 70 * devicePixelRatio) continue; // no text over another one
          context.fillText(hasDied ? get("panels").dataset.restart : get("panels").dataset.resume, x + 4, plot.bbox.top + 12 * devicePixelRatio);
          said = x;
        }
      }
      context.restore();
    }

    function make(holder, kind, name) {
      const { found, data } = tables(kind, name), figure = document.createElement("figure");
      const title = kind === "eval" ? `eval ${name}` : name, caption = document.createElement("figcaption"), value = document.createElement("span");
      const format = name === "memory" ? bytes : number, isTime = axis.value === "time";
      caption.append(title, Object.assign(value, { className: "soft" }));
      figure.append(caption);
      figure.setAttribute("aria-label", title);
      holder.append(figure);
      const scale = (more) => ({ stroke: colour("--soft"), grid: { stroke: colour("--edge"), width: 1 }, ticks: { stroke: colour("--edge"), width: 1 }, ...more });
      const plot = new uPlot({
        width: width(figure), height: 220, legend: { show: found.length > 1, live: false },
        cursor: { sync: { key: "page", setSeries: false }, drag: { x: true, y: false }, points: { size: 6 } },
        scales: { x: { time: false }, y: log.checked ? { distr: 3 } : {} },
        axes: [
          scale({ values: (_, all) => all.map(isTime ? seconds : number), space: 70 }),
          scale({ values: (_, all) => all.map((one) => (one === null ? "" : format(one))), size: name === "memory" ? 78 : 62 }),
        ],
        series: [
          { label: isTime ? "time" : "step", value: (_, at) => (isTime ? seconds(at) : number(at)) },
          ...found.map((run) => {
            const place = runs.indexOf(run), dash = (place + Math.floor(place / COLOURS.length)) % DASHES.length;
            return {
              label: `${SIGNS[dash]} ${run.name}`, stroke: colour(COLOURS[place % COLOURS.length]), width: 1.6, spanGaps: true, value: (_, at) => format(at),
              dash: DASHES[dash], points: kind === "eval" || data[0].length < 20 ? {} : { show: false },
            };
          }),
        ],
        hooks: { draw: [marks], setSelect: [select], setCursor: [(one) => tell(one)] },
      }, data, figure);
      function tell(one) {
        const last = one.data[0].length - 1, known = (all) => all.findLastIndex((value) => !isNone(value)), isAt = !isNone(one.cursor.idx) && one.cursor.idx <= last;
        const at = isAt ? one.cursor.idx : one.data.length > 2 ? last : known(one.data[1]); // the last value may be older than the last line
        value.textContent = one.data.slice(1).map((all) => format(all[isAt ? at : known(all)])).join(" / ") + (isAt || at < last ? ` · ${(isTime ? seconds : number)(one.data[0][at])}` : "");
      }
      plot.over.addEventListener("mousedown", () => { source = plot; });
      plot.over.addEventListener("dblclick", () => choose("1"));
      return { plot, figure, tell, count: found.length };
    }

    function select(plot) {
      if (plot.select.width <= 0 || plot !== source) return; // the other curves follow
      choose("own", { min: plot.posToVal(plot.select.left, "x"), max: plot.posToVal(plot.select.left + plot.select.width, "x") });
    }

    function choose(shown, selected = null) {
      zoom = selected;
      range.value = shown;
      setRanges();
      keep();
    }

    function extent(data) {
      const first = data[0][0], last = data[0][data[0].length - 1], share = Number(range.value);
      return { min: last - (last - first) * (share || 1), max: last > first ? last : first + 1 };
    }

    function setRanges() { // uPlot draws in a microtask
      queueMicrotask(() => panels.forEach(({ plot }) => plot.setScale("x", zoom || extent(plot.data))));
    }

    function draw(again = false) {
      if (!window.uPlot) return;
      const folded = get("folded"), machine = get("panels").dataset.machine.split(" "), wanted = new Set();
      const some = (kind) => [...new Set(runs.flatMap((run) => Object.keys(run[kind].figures)))].map((name) => [kind, name]);
      const isFolded = ([kind, name]) => kind === "line" && machine.includes(name);
      const all = [...some("line"), ...some("eval")];
      folded.hidden = !all.some(isFolded);
      for (const [kind, name] of all) {
        if (isFolded([kind, name]) && !folded.open) continue;
        const key = `${kind} ${name}`, { found, data } = tables(kind, name);
        if (!data || !data[0].length) continue;
        wanted.add(key);
        if (panels.has(key) && (again || panels.get(key).count !== found.length)) remove(key);
        if (panels.has(key)) panels.get(key).plot.setData(data, false);
        else panels.set(key, make(get(isFolded([kind, name]) ? "machine-panels" : "panels"), kind, name));
        panels.get(key).tell(panels.get(key).plot);
      }
      for (const key of [...panels.keys()]) if (!wanted.has(key)) remove(key);
      controls.hidden = !panels.size;
      fit(); // a new panel leaves the others less room
      setRanges();
      get("svg").hidden = panels.size > 0;
    }

    function remove(key) {
      panels.get(key).plot.destroy();
      panels.get(key).figure.remove();
      panels.delete(key);
    }

    const width = (figure) => Math.max(figure.clientWidth, 200);
    const fit = () => panels.forEach(({ plot, figure }) => plot.width !== width(figure) && plot.setSize({ width: width(figure), height: 220 }));
    const place = `train-view ${location.pathname}`, details = document.querySelectorAll("details"); // a reload keeps what was chosen

    function keep() {
      const open = Array.from(details).filter((one) => one.open).map((one) => one.id);
      attempt(() => sessionStorage.setItem(place, JSON.stringify({ axis: axis.value, log: log.checked, range: range.value, zoom, open })));
    }

    function restore() {
      const known = JSON.parse(sessionStorage.getItem(place));
      if (!known) return;
      for (const one of details) one.open = known.open.includes(one.id);
      [axis.value, log.checked, range.value, zoom] = [known.axis, known.log, known.range, known.zoom];
    }

    if (controls) {
      attempt(restore);
      controls.addEventListener("submit", (event) => event.preventDefault());
      axis.addEventListener("change", () => { choose(zoom ? "1" : range.value); draw(true); });
      log.addEventListener("change", () => { keep(); draw(true); });
      range.addEventListener("change", () => choose(range.value));
      for (const one of details) one.addEventListener("toggle", () => { keep(); attempt(draw); });
      window.addEventListener("resize", fit);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
    }

    return (found) => {
      runs = found;
      put(get("notes"), [...new Set(runs.flatMap((run) => run.notes))].join(" "));
      if ((axis.options[1].disabled = runs.some((run) => !run.is_timed))) axis.value = "step";
      attempt(draw);
    };
  })();

  // --- start

  function attempt(work) { // what one part of the page meets does not end the others
    try {
      return work();
    } catch (error) {
      console.error(error);
    }
  }

  function setAddress(name, value) {
    const here = new URL(location.href);
    here.searchParams.delete(name);
    if (value !== undefined) here.searchParams.set(name, value);
    if (here.href !== location.href) history.replaceState(null, "", here);
  }

  async function copy(button) {
    const code = button.closest("tr").querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch { // a browser has no clipboard for a page that came by plain HTTP from another machine
      document.getSelection().selectAllChildren(code);
      if (!document.execCommand("copy")) return; // it is selected: Ctrl-C
    }
    button.textContent = document.body.dataset.copied;
  }

  main.addEventListener("click", (event) => event.target.closest("[data-copy]") && copy(event.target.closest("[data-copy]")));
  for (const kind of ["pointermove", "pointerdown", "keydown", "wheel"]) addEventListener(kind, touch, { passive: true });
  setAddress("token"); // the cookie replaces it, and an address is easily shown to others
  get("output")?.scrollTo(0, get("output").scrollHeight);
  get("ranks")?.elements.rank.addEventListener("change", (event) => {
    rank = event.target.value;
    setAddress("rank", rank);
    get("output").textContent = "";
    ask();
  });
  attempt(() => { if (get("data")) showCurves(JSON.parse(get("data").textContent)); });
  const come = () => { arrive(); wait = EVERY; ask(); };
  document.addEventListener("visibilitychange", come);
  come();
})();
