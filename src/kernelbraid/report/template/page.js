"use strict";
(async () => {
  const $ = (id) => document.getElementById(id);
  // Text from a study only ever becomes text nodes.
  const make = (tag, attributes, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
    element.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return element;
  };
  const trouble = (words) => { $("trouble").textContent = words; $("trouble").hidden = false; };
  if (typeof DecompressionStream === "undefined") {
    trouble("This browser cannot inflate the details inside this page; pictures and tables are complete without them.");
    return;
  }
  const inflate = async (id) => {
    const bytes = Uint8Array.from(atob($(id).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  };
  const data = await inflate("data");
  const nodes = data.nodes;
  const short = (i) => nodes[i].sha256.slice(0, 12);
  const children = nodes.map(() => []);
  nodes.forEach((node, i) => { if (node.parents.length) children[node.parents[0]].push(i); });
  const bySha = new Map(nodes.map((_, i) => [short(i), i]));
  const show = (value) => value === null || value === undefined ? "-"
    : typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : value.toLocaleString("en");

  // Sources: whole, or as differences from the first parent; inflated when first needed.
  let packed = null;
  const lines = new Map();
  const source = (i) => {
    const chain = [];
    let at = i;
    while (!lines.has(at)) { chain.push(at); if (packed[at][0] < 0) break; at = packed[at][0]; }
    for (const node of chain.reverse()) {
      const [parent, stored] = packed[node];
      if (parent < 0) { lines.set(node, stored.split("\n")); continue; }
      const own = lines.get(parent).slice();
      for (const [start, end, text] of stored.slice().reverse())
        own.splice(start, end - start, ...(text === null ? [] : text.split("\n")));
      lines.set(node, own);
    }
    return lines.get(i);
  };

  // The longest common subsequence of what lies between the first and the last difference.
  const diff = (a, b) => {
    let first = 0, last = 0;
    const shorter = Math.min(a.length, b.length);
    while (first < shorter && a[first] === b[first]) first++;
    while (last < shorter - first && a[a.length - 1 - last] === b[b.length - 1 - last]) last++;
    const n = a.length - first - last, m = b.length - first - last, out = [];
    for (let i = 0; i < first; i++) out.push([" ", a[i]]);
    if (n * m > 16e6) {
      for (let i = 0; i < n; i++) out.push(["-", a[first + i]]);
      for (let j = 0; j < m; j++) out.push(["+", b[first + j]]);
    } else {
      const table = new Uint16Array((n + 1) * (m + 1));
      for (let i = n - 1; i >= 0; i--) for (let j = m - 1; j >= 0; j--)
        table[i * (m + 1) + j] = a[first + i] === b[first + j] ? table[(i + 1) * (m + 1) + j + 1] + 1
          : Math.max(table[(i + 1) * (m + 1) + j], table[i * (m + 1) + j + 1]);
      let i = 0, j = 0;
      while (i < n || j < m) {
        if (i < n && j < m && a[first + i] === b[first + j]) { out.push([" ", a[first + i++]]); j++; }
        else if (i < n && (j === m || table[(i + 1) * (m + 1) + j] >= table[i * (m + 1) + j + 1])) out.push(["-", a[first + i++]]);
        else out.push(["+", b[first + j++]]);
      }
    }
    for (let i = a.length - last; i < a.length; i++) out.push([" ", a[i]]);
    return out;
  };
  const CONTEXT = 3;
  const patch = (a, b) => {
    const rows = diff(a, b), near = new Uint8Array(rows.length);
    rows.forEach(([mark], i) => {
      if (mark !== " ") near.fill(1, Math.max(0, i - CONTEXT), i + CONTEXT + 1);
    });
    const out = make("pre", { tabindex: "0", "aria-label": "Difference of the sources" });
    let skipped = 0, old = 0, fresh = 0;
    rows.forEach(([mark, text], i) => {
      if (mark !== "+") old++;
      if (mark !== "-") fresh++;
      if (!near[i]) { skipped++; return; }
      if (skipped || out.childNodes.length === 0) out.append(make("span", { class: "gap" }, `@@ -${old} +${fresh} @@\n`));
      skipped = 0;
      out.append(make("span", { class: mark === "+" ? "plus" : mark === "-" ? "minus" : "same" }, `${mark}${text}\n`));
    });
    if (!out.childNodes.length) out.append("The sources are equal line by line.");
    return out;
  };

  // The drawing: a view box that moves over it.
  const graph = $("graph");
  const whole = graph.getAttribute("viewBox").split(" ").map(Number);
  let box = whole.slice(), selected = null;
  const look = () => graph.setAttribute("viewBox", box.join(" "));
  const scale = () => { const r = graph.getBoundingClientRect(); return Math.min(r.width / box[2], r.height / box[3]); };
  const place = (event) => {
    const r = graph.getBoundingClientRect(), s = scale();
    return [box[0] + box[2] / 2 + (event.clientX - r.left - r.width / 2) / s,
      box[1] + box[3] / 2 + (event.clientY - r.top - r.height / 2) / s];
  };
  const zoom = (factor, x = box[0] + box[2] / 2, y = box[1] + box[3] / 2) => {
    const f = Math.min(Math.max(factor, 6 / box[2]), 2 * whole[2] / box[2]);
    box = [x - (x - box[0]) * f, y - (y - box[1]) * f, box[2] * f, box[3] * f];
    look();
  };
  const fit = () => { box = whole.slice(); look(); };
  const buckets = new Map();
  nodes.forEach((_, i) => buckets.set(`${data.x[i]},${data.y[i]}`, i));
  const nearest = (x, y) => {
    let best = null, least = 1.2;
    for (let a = Math.round(x) - 1; a <= Math.round(x) + 1; a++) for (let b = Math.round(y) - 1; b <= Math.round(y) + 1; b++) {
      const i = buckets.get(`${a},${b}`), distance = Math.hypot(a - x, b - y);
      if (i !== undefined && distance < least) { best = i; least = distance; }
    }
    return best;
  };
  const ring = (i, kind) => {
    const circle = document.createElementNS(graph.namespaceURI, "path");
    circle.setAttribute("class", `mark ${kind}`);
    circle.setAttribute("d", `M${data.x[i] - 0.7} ${data.y[i]}a.7 .7 0 1 0 1.4 0a.7 .7 0 1 0-1.4 0`);
    graph.append(circle);
  };
  const describe = (i) => {
    const node = nodes[i], tried = node.change ? node.change.hypothesis || "" : node.label;
    return `${short(i)}, ${node.state}, ratio to root ${show(node.ratio)}${tried ? `: ${tried.slice(0, 200)}` : ""}`;
  };
  const under = (i) => { $("under").textContent = i === null ? (selected === null ? "" : describe(selected)) : describe(i); };

  // Details of one implementation.
  const link = (i) => make("a", { class: "hash", href: `#i-${short(i)}` }, short(i));
  const links = (list) => list.flatMap((i) => [link(i), " "]);
  const table = (columns, rows) => make("table", {},
    make("thead", {}, make("tr", {}, columns.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map((cell) =>
      make("td", typeof cell === "number" ? { class: "number" } : {}, cell instanceof Node ? cell : String(show(cell))))))));
  const facts = (pairs) => make("dl", {}, pairs.filter(([, value]) => value && value.length !== 0)
    .map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, make("bdi", {}, value)))));
  const folded = (ids) => ids.length < 4 ? ids.join(", ")
    : make("details", {}, make("summary", {}, `${ids.length} requirements`), make("ul", {}, ids.map((id) => make("li", {}, make("code", {}, id)))));
  const audit = (each) => {
    const out = make("section", {});
    const reqs = data.sets[each.checked] || [], failed = each.failures.length;
    out.append(make("h4", {}, `${each.level} audit: ${each.status}`));
    if (each.reason) out.append(make("p", {}, make("bdi", {}, each.reason)));
    const bound = each.error === null ? "" : `; largest error over its bound ${show(each.error)}`;
    out.append(make("p", {}, `${show(reqs.length - failed)} of ${show(reqs.length)} requirements checked hold, ${show(each.comparisons)} elements compared as bits${bound}; bits id ${each.bits_id || "-"}`));
    for (const failure of each.failures) {
      const d = failure.difference;
      const words = d === null ? `error over its bound ${show(failure.error)}`
        : `${d.place}: ${d.left} against ${d.right}${d.ulp === null ? "" : `, ${show(d.ulp)} ULP apart`}; ${show(d.unequal)} unequal; seed ${d.seed}; case ${d.case}`;
      out.append(make("p", {}, make("code", {}, failure.requirement), " broke: ", make("bdi", {}, words)));
    }
    if (each.timings.length) out.append(table(["workload", "ms", "root ms", "ratio", "limit", "bound ms", "processes"],
      each.timings.map(([w, protocol, processes, ms, root, , bound]) =>
        [`${typeof w === "number" ? data.workloads[w] : w}${protocol === "cold" ? "" : ` (${protocol})`}`, ms, root,
          typeof ms === "number" && typeof root === "number" ? ms / root : null, typeof w === "number" ? data.limits[w] : null, bound, processes])));
    if (reqs.length) out.append(make("details", {}, make("summary", {}, "requirements checked"), make("ul", {},
      reqs.map((r) => make("li", {}, make("code", {}, data.requirements[r]),
        each.failures.some((f) => f.requirement === data.requirements[r]) ? " broke" : " held")))));
    if (each.seconds.length) out.append(make("p", {}, `seconds: ${each.seconds.map(([stage, s]) => `${stage} ${show(s)}`).join(", ")}`));
    return out;
  };
  const sourceOf = (i) => {
    const out = make("section", {}), node = nodes[i], holder = make("div", {});
    out.append(make("h4", {}, "Source"));
    const put = async (what) => {
      holder.replaceChildren("inflating the sources ...");
      packed = packed || await inflate("sources");
      if (selected !== i) return;
      if (what === "whole") holder.replaceChildren(make("pre", { tabindex: "0", "aria-label": "Source" }, source(i).join("\n")));
      else holder.replaceChildren(patch(source(what), source(i)));
    };
    const choice = (name, what) => {
      const button = make("button", { type: "button" }, name);
      button.addEventListener("click", () => put(what));
      return button;
    };
    out.append(make("p", {}, node.parents.map((p) => choice(`changes from ${short(p)}`, p)),
      i > 0 && !node.parents.includes(0) ? choice("changes from the root", 0) : null, choice("whole source", "whole")), holder);
    if (node.parents.length) put(node.parents[0]);
    return out;
  };
  const detail = (i) => {
    const node = nodes[i], c = node.change || {}, out = $("detail");
    const branch = node.branch === null ? "the line from root to incumbent" : link(node.branch);
    out.replaceChildren(make("h3", {}, make("code", {}, short(i)), " ", make("bdi", {}, node.label)),
      facts([["sha256", make("code", {}, node.sha256)], ["state", node.state], ["branch", branch], ["ratio to root", String(show(node.ratio))],
        ["made from", links(node.parents)], ["first parent of", links(children[i].slice(0, 40)).concat(children[i].length > 40 ? [`and ${children[i].length - 40} more`] : [])],
        ["hypothesis", c.hypothesis], ["mechanism", c.mechanism], ["rationale", c.rationale],
        ["edit", c.edit === undefined ? null : make("code", {}, JSON.stringify(c.edit))],
        ["functions", (c.functions || []).join(", ")], ["regimes", (c.regimes || []).join(", ")], ["expected effect", c.expected_effect],
        ["falsified by", c.falsified_by], ["proposer", c.proposer],
        ["at risk", folded(c.requirements_at_risk || [])]]));
    for (const each of node.decisions) out.append(make("p", {}, make("strong", {}, `lineage: ${each.decision}`), ` by ${each.by}: `, make("bdi", {}, each.reason)));
    for (const each of node.promotions) {
      out.append(make("p", {}, make("strong", {}, each.granted ? "promoted" : `promotion refused, ${each.blocked_by}`), ": ", make("bdi", {}, each.reason), each.bits_changed ? " (its bits are not the previous incumbent's)" : ""));
      out.append(make("details", {}, make("summary", {}, "checks"), table(["check", "held", "value", "limit", ""],
        each.checks.map((k) => [k.name, k.held ? "yes" : "NO", k.value, k.limit, k.detail || ""]))));
    }
    out.append(sourceOf(i));
    if (!node.audits.length) out.append(make("p", {}, "No audit has answered for it."));
    for (const each of node.audits) out.append(audit(each));
    out.scrollTop = 0;
  };
  const select = (i, { move = true } = {}) => {
    if (selected !== null) $(`i-${short(selected)}`).removeAttribute("aria-current");
    selected = i;
    $(`i-${short(i)}`).setAttribute("aria-current", "true");
    $("explorer").classList.add("open");
    $("detail").hidden = false;
    graph.querySelectorAll(".mark").forEach((mark) => mark.remove());
    ring(i, "own");
    nodes[i].parents.forEach((p) => ring(p, "parent"));
    const [x, y] = [data.x[i], data.y[i]], inside = x > box[0] && x < box[0] + box[2] && y > box[1] && y < box[1] + box[3];
    if (move && !inside) { box[0] = x - box[2] / 2; box[1] = y - box[3] / 2; look(); }
    under(null);
    detail(i);
    if (location.hash !== `#i-${short(i)}`) history.replaceState(null, "", `#i-${short(i)}`);
  };

  // Pointer, keys, links, filter.
  let drag = null;
  graph.addEventListener("pointerdown", (e) => { drag = { x: e.clientX, y: e.clientY, box: box.slice(), moved: false }; graph.setPointerCapture(e.pointerId); });
  graph.addEventListener("pointermove", (e) => {
    if (!drag) { under(nearest(...place(e))); return; }
    const dx = e.clientX - drag.x, dy = e.clientY - drag.y;
    if (Math.hypot(dx, dy) < 4 && !drag.moved) return;
    drag.moved = true;
    box[0] = drag.box[0] - dx / scale();
    box[1] = drag.box[1] - dy / scale();
    look();
  });
  graph.addEventListener("pointerup", (e) => {
    const i = drag && !drag.moved ? nearest(...place(e)) : null;
    drag = null;
    if (i !== null) select(i);
  });
  graph.addEventListener("pointercancel", () => { drag = null; });
  graph.addEventListener("wheel", (e) => {
    if (!e.ctrlKey && !e.metaKey) return;
    e.preventDefault();
    zoom(Math.exp(e.deltaY * 0.002), ...place(e));
  }, { passive: false });
  const sibling = (i, by) => {
    const around = nodes[i].parents.length ? children[nodes[i].parents[0]] : [i];
    return around[Math.min(Math.max(around.indexOf(i) + by, 0), around.length - 1)];
  };
  const onward = (i) => children[i].find((c) => nodes[c].branch === null) ?? children[i].find((c) => children[c].length) ?? children[i][0] ?? i;
  const KEYS = {
    ArrowLeft: (i) => nodes[i].parents[0] ?? i, ArrowRight: onward, ArrowUp: (i) => sibling(i, -1), ArrowDown: (i) => sibling(i, 1),
    Home: () => 0, End: () => data.incumbent,
  };
  graph.setAttribute("tabindex", "0");
  graph.setAttribute("role", "application");
  graph.setAttribute("aria-describedby", "hint under");
  $("under").setAttribute("aria-live", "polite");
  graph.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    if (e.key in KEYS) select(selected === null ? (e.key === "End" ? data.incumbent : 0) : KEYS[e.key](selected));
    else if (e.key === "+" || e.key === "=") zoom(0.7, ...(selected === null ? [] : [data.x[selected], data.y[selected]]));
    else if (e.key === "-") zoom(1 / 0.7);
    else if (e.key === "0") fit();
    else if (e.key === "Enter" && selected !== null) $("detail").focus();
    else return;
    e.preventDefault();
  });
  $("nearer").addEventListener("click", () => zoom(0.7));
  $("farther").addEventListener("click", () => zoom(1 / 0.7));
  $("fit").addEventListener("click", fit);
  document.addEventListener("click", (e) => {
    const anchor = e.target.closest("a.hash");
    if (!anchor) return;
    e.preventDefault();
    select(bySha.get(anchor.hash.slice(3)));
    if (!anchor.closest("#detail")) $("descent").scrollIntoView();
    $("detail").focus({ preventScroll: true });
  });
  document.querySelectorAll("[data-points]").forEach((chart) => {
    const svg = chart.querySelector("svg"), width = svg.viewBox.baseVal.width;
    const hit = (e) => {
      const r = svg.getBoundingClientRect(), s = width / r.width, x = (e.clientX - r.left) * s, y = (e.clientY - r.top) * s;
      let best = null, least = 10;
      for (const [i, a, b] of data.points[chart.dataset.points]) {
        const distance = Math.hypot(a - x, b - y);
        if (distance < least) { best = i; least = distance; }
      }
      return best;
    };
    svg.addEventListener("pointermove", (e) => { const i = hit(e); svg.querySelector("title").textContent = i === null ? svg.getAttribute("aria-label") : describe(i); });
    svg.addEventListener("click", (e) => { const i = hit(e); if (i !== null) { select(i); $("descent").scrollIntoView(); } });
  });
  const rows = [...$("list").tBodies[0].rows];
  const words = rows.map((row) => row.textContent.toLowerCase());
  $("filter").addEventListener("input", (e) => {
    const wanted = e.target.value.trim().toLowerCase().split(/\s+/);
    let shown = 0;
    rows.forEach((row, i) => { const keep = wanted.every((word) => words[i].includes(word)); row.hidden = !keep; shown += keep; });
    $("shown").textContent = `${shown.toLocaleString("en")} of ${rows.length.toLocaleString("en")}`;
  });
  document.querySelectorAll(".scripted").forEach((element) => { if (element.id !== "detail") element.hidden = false; });
  const start = () => { const i = bySha.get(location.hash.slice(3)); if (i !== undefined && location.hash.startsWith("#i-")) select(i); };
  window.addEventListener("hashchange", start);
  start();
  document.documentElement.dataset.ready = "yes";
})();
