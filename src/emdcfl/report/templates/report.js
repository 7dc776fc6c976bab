"use strict";
(() => {
  const tip = document.getElementById("tip");

  const place = (x, y) => {
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - box.width - 6)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(6, y - box.height - 12) : y + 18) + "px";
  };
  const show = (text, x, y) => { tip.textContent = text; tip.hidden = false; place(x, y); };
  const hide = () => { tip.hidden = true; };

  // Marks of a drawing: text when pointed at or focused; one stop of the tab key, arrows go on from there.
  for (const chart of document.querySelectorAll("[data-roving]")) {
    const marks = [...chart.querySelectorAll("[data-tip]")];
    if (marks.length) marks[0].setAttribute("tabindex", "0");
    chart.addEventListener("pointerover", (e) => { if (e.target.dataset.tip) show(e.target.dataset.tip, e.clientX, e.clientY); });
    chart.addEventListener("pointermove", (e) => { if (e.target.dataset.tip) place(e.clientX, e.clientY); });
    chart.addEventListener("pointerout", hide);
    chart.addEventListener("focusin", (e) => {
      const box = e.target.getBoundingClientRect();
      if (e.target.dataset.tip) show(e.target.dataset.tip, box.right, box.bottom);
    });
    chart.addEventListener("focusout", hide);
    chart.addEventListener("keydown", (e) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[e.key];
      if (e.key === "Escape") hide();
      const at = marks.indexOf(e.target);
      if (!step || at < 0) return;
      e.preventDefault();
      const next = marks[(at + step + marks.length) % marks.length];
      e.target.setAttribute("tabindex", "-1");
      next.setAttribute("tabindex", "0");
      next.focus();
    });
  }

  // Tables: a button in each head sorts; what has no value stays last.
  for (const table of document.querySelectorAll("table[data-sort]")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const first = head.dataset.first || "ascending";
        const other = first === "ascending" ? "descending" : "ascending";
        const wanted = head.getAttribute("aria-sort") === first ? other : first;
        heads.forEach((h) => h.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", wanted);
        const sign = wanted === "ascending" ? 1 : -1;
        const key = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent.trim();
        const numeric = head.hasAttribute("data-number");
        const rows = [...table.tBodies[0].rows];
        rows.sort((a, b) => {
          const x = key(a), y = key(b);
          if (x === "" || y === "") return (x === "") - (y === "");
          return sign * (numeric ? x - y : x.localeCompare(y, undefined, { numeric: true }));
        });
        table.tBodies[0].append(...rows);
      });
    });
  }
  for (const input of document.querySelectorAll("input[data-filter]")) {
    const table = document.getElementById(input.dataset.filter);
    const count = document.getElementById(input.dataset.filter + "-count");
    input.addEventListener("input", () => {
      const wanted = input.value.toLowerCase();
      let shown = 0;
      for (const row of table.tBodies[0].rows) {
        row.hidden = !row.textContent.toLowerCase().includes(wanted);
        shown += !row.hidden;
      }
      count.textContent = wanted ? `${shown} shown` : "";
    });
  }

  // The heat map.
  const source = document.getElementById("heat-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const n = data.names.length;
  const frame = document.getElementById("heat"), canvas = frame.querySelector("canvas"), say = document.getElementById("heat-say");
  const tolerance = (i, j) => (data.epsilon.length === n ? data.epsilon[i] : data.epsilon[i * n + j]);
  const ratio = (i, j) => {
    const w = data.w[i * n + j], e = tolerance(i, j);
    if (i === j || w === null || e === null) return null;
    return e > 0 ? w / e : (w < e ? 0 : 6);
  };
  let top = 1.5;
  for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) { const r = ratio(i, j); if (r !== null && r > top) top = r; }
  top = Math.min(top, 6);
  let size = 0, left = 0, above = 0, cell = 0, at = null;

  const describe = (i, j) => {
    if (i === j) return `${data.names[i]}\ncluster ${data.clusters[i]}`;
    const w = data.w[i * n + j], mark = { 2: "≥ ", 3: "≤ " }[data.kind[i * n + j]] || "", e = tolerance(i, j);
    const head = `${data.names[i]} → ${data.names[j]}\n`;
    if (w === null) return head + "not compared";
    const r = e > 0 ? ` = ${mark}${(w / e).toPrecision(3)} × tolerance` : "";
    const back = data.w[j * n + i];
    const linked = w < e && back !== null && back < tolerance(j, i) ? "linked" : w < e ? "accepted in this direction" : "refused";
    return `${head}W ${mark}${w}${r}\n${linked}`;
  };

  const colour = (text) => {
    const hex = text.trim().replace("#", "");
    return [0, 2, 4].map((k) => parseInt(hex.slice(k, k + 2), 16));
  };
  const mix = (a, b, t) => a.map((v, k) => Math.round(v + (b[k] - v) * t));

  const draw = () => {
    const css = getComputedStyle(document.documentElement), value = (name) => css.getPropertyValue(name);
    const low = colour(value("--heat-low")), mid = colour(value("--heat-mid")), high = colour(value("--heat-high"));
    const width = frame.clientWidth, density = devicePixelRatio || 1;
    if (!width) return;
    const named = n <= 40 && width / n > 9;
    const pen = canvas.getContext("2d");
    const font = `${named && n > 24 ? 9 : 11}px ${getComputedStyle(document.body).fontFamily}`;
    pen.font = font;
    const cut = (text, most) => {
      if (pen.measureText(text).width <= most) return text;
      let short = text;
      while (short && pen.measureText(short + "…").width > most) short = short.slice(0, -1);
      return short + "…";
    };
    const room = named ? Math.min(width * 0.26, Math.max(...data.names.map((t) => pen.measureText(t).width)) + 8) : 0;
    left = room + 9; above = room + 9;
    cell = (width - left) / n; size = width;
    canvas.width = Math.round(width * density); canvas.height = Math.round((above + cell * n) * density);
    pen.scale(density, density);
    pen.font = font; pen.textBaseline = "middle";
    const gap = cell > 12 ? 1 : 0;
    for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) {
      const r = ratio(i, j), x = left + j * cell, y = above + i * cell;
      let fill = null;
      if (r === null) pen.fillStyle = i === j ? value("--soft") : value("--heat-none");
      else {
        const t = r < 1 ? Math.min(1 - r, 1) : Math.min((r - 1) / (top - 1), 1);
        fill = mix(mid, r < 1 ? low : high, 0.18 + 0.82 * t);
        pen.fillStyle = `rgb(${fill})`;
      }
      pen.fillRect(x, y, cell - gap + (gap ? 0 : 0.4), cell - gap + (gap ? 0 : 0.4));
      if (fill && n <= 16 && cell > 33) {
        const w = data.w[i * n + j], mark = { 2: "≥", 3: "≤" }[data.kind[i * n + j]] || "";
        const light = 0.299 * fill[0] + 0.587 * fill[1] + 0.114 * fill[2] > 145;
        pen.fillStyle = light ? "#16181c" : "#ffffff";
        pen.textAlign = "center";
        pen.fillText(mark + w.toFixed(cell > 36 ? 3 : 2).replace(/^(-?)0\./, "$1."), x + cell / 2, y + cell / 2 + 0.5);
      }
    }
    for (let i = 0; i < n; i++) {
      pen.fillStyle = value("--" + data.colours[i].replace("k", "c"));
      pen.fillRect(left - 7, above + i * cell, 4, cell - gap + 0.3);
      pen.fillRect(left + i * cell, above - 7, cell - gap + 0.3, 4);
      if (!named) continue;
      pen.fillStyle = value("--ink");
      pen.textAlign = "right";
      pen.fillText(cut(data.names[i], room - 2), left - 11, above + (i + 0.5) * cell);
      pen.save();
      pen.translate(left + (i + 0.5) * cell, above - 11);
      pen.rotate(-Math.PI / 2);
      pen.textAlign = "left";
      pen.fillText(cut(data.names[i], room - 2), 0, 0);
      pen.restore();
    }
    pen.strokeStyle = value("--ink"); pen.lineWidth = cell > 12 ? 1.5 : 1;
    for (let i = 0, start = 0; i <= n; i++) {
      if (i < n && data.clusters[i] === data.clusters[start]) continue;
      pen.strokeRect(left + start * cell - gap / 2, above + start * cell - gap / 2, (i - start) * cell, (i - start) * cell);
      start = i;
    }
    if (at) {
      pen.strokeStyle = value("--accent"); pen.lineWidth = 2.5;
      pen.strokeRect(left + at[1] * cell, above + at[0] * cell, Math.max(cell - gap, 3), Math.max(cell - gap, 3));
    }
  };
  const choose = (i, j, x, y) => {
    const moved = !at || at[0] !== i || at[1] !== j;
    at = [i, j];
    if (moved) { draw(); say.textContent = describe(i, j).replaceAll("\n", " · "); }
    show(describe(i, j), x, y);
  };
  const leave = () => { hide(); if (at && document.activeElement !== frame) { at = null; draw(); } };
  frame.addEventListener("pointermove", (e) => {
    const box = canvas.getBoundingClientRect();
    const i = Math.floor((e.clientY - box.top - above) / cell), j = Math.floor((e.clientX - box.left - left) / cell);
    if (i >= 0 && j >= 0 && i < n && j < n) choose(i, j, e.clientX, e.clientY); else leave();
  });
  frame.addEventListener("pointerleave", leave);
  frame.addEventListener("blur", () => { at = null; hide(); draw(); });
  const fromKey = (i, j) => {
    const box = canvas.getBoundingClientRect();
    choose(i, j, box.left + left + (j + 1) * cell, box.top + above + (i + 0.5) * cell);
  };
  frame.addEventListener("focus", () => { if (frame.matches(":focus-visible")) fromKey(...(at || [0, Math.min(1, n - 1)])); });
  frame.addEventListener("keydown", (e) => {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[e.key];
    if (e.key === "Escape") hide();
    if (!step) return;
    e.preventDefault();
    const [i, j] = at || [0, 0];
    fromKey((i + step[0] + n) % n, (j + step[1] + n) % n);
  });
  new ResizeObserver(() => { if (frame.clientWidth !== size) draw(); }).observe(frame);
  for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", draw);
  draw();
})();
