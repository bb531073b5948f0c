/* The page: summary, maps of heads, viewers, comparison. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  /* Heads come as columns, and are read as rows. */
  const rowsOf = (columns) => columns.site.map((_, i) => Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[i]])));
  data.models.forEach((model) => { model.heads = rowsOf(model.heads); });
  const several = data.models.length > 1;
  const siteName = (site) => { const name = data.sites[site]?.name || site; return name[0].toUpperCase() + name.slice(1); };
  const roleName = (site, role) => (site === "cross" && data.crossRoles[role]) || data.roles[role] || role;
  const headLabel = (site, layer, head) => `${shortSite[site] || site} ${layer}.${head}`;

  /* Roles carry a letter as well as a colour. */
  const roleLook = {
    previous: ["P", "#0072b2"], current: ["S", "#5a6672"], next: ["N", "#3f9bd6"], first: ["1", "#8a6d00"], special: ["E", "#b08900"],
    punctuation: [".", "#7a5230"], subword: ["W", "#007f5f"], repeated: ["R", "#9b4f96"], induction: ["I", "#c2599f"], question: ["?", "#b3261e"],
    copy: ["C", "#a3356b"], diagonal: ["/", "#2f7d8c"], monotone: ["M", "#1a6b4f"],
    dependency_head: ["H", "#c25100"], dependent: ["D", "#e07b39"], aligned_output: ["A", "#4b3ca8"], aligned_input: ["B", "#7568cf"],
  };
  for (const role of Object.keys(data.roles)) roleLook[role] ||= [data.roles[role][0].toUpperCase(), "#3d4f6b"];
  const hasRoles = (model, site) => model.ranked[site].some((layer) => layer.some((roles) => roles.length));
  const rolesMeasured = data.models.some((model) => Object.keys(model.ranked).some((site) => hasRoles(model, site)));
  const metrics = [
    ["role", "Role", null], ["density", "Density", percent], ["alpha", "α", (v) => fixed(v, 2)], ["max_weight", "Largest weight", percent],
    ["entropy", "Entropy", (v) => fixed(v, 2) + " nats"], ["dependency_accuracy", "Syntax", percent], ["aer_argmax_output", "AER", percent],
    ["importance_masking", "Loss without it", (v) => fixed(v, 4) + " nats"], ["importance_gradient", "Gradient", (v) => fixed(v, 4) + " nats"],
    ...Object.entries(data.statistics).map(([name, label]) => [name, label, name === "firing" ? percent : (v) => fixed(v, 3)]),
  ].filter(([key]) => (key === "role" && rolesMeasured) || data.models.some((model) => model.heads.some((head) => head[key] !== null && head[key] !== undefined)));
  const range = {};
  for (const [key] of metrics.filter(([key]) => key !== "role")) {
    const values = data.models.flatMap((model) => model.heads.map((head) => head[key]).filter((v) => v !== null && v !== undefined));
    range[key] = key === "density" || key === "max_weight" ? [0, 1] : key === "alpha" ? [Math.min(1, ...values), Math.max(2, ...values)] : [Math.min(0, ...values), Math.max(...values)];
  }
  data.models.forEach((model) => { model.byHead = new Map(model.heads.map((head) => [`${head.site}/${head.layer}/${head.head}`, head])); });

  /* Roles come first where heads have roles; where hardly any has one, what tells the heads apart. */
  const allHeads = data.models.flatMap((model) => model.heads);
  const spread = (key) => { const values = allHeads.map((head) => head[key]).filter((v) => v !== null && v !== undefined); return values.length ? Math.max(...values) - Math.min(...values) : 0; };
  const named = allHeads.filter((head) => head.role).length;
  const offered = metrics.map(([key]) => key);
  let metric = named >= 0.1 * allHeads.length && offered.includes("role") ? "role"
    : ["density", "alpha", "max_weight", "entropy"].find((key) => offered.includes(key) && spread(key) > 0.02) || offered[0] || "role";
  let linked = true;
  const panes = [];
  let table;

  /* ---------- summary ---------- */
  const chip = (m, [site, layer, head, label]) =>
    make("button", { class: "chip", type: "button", style: `--site:${siteVariable[site]}`, onclick: () => choose(m, site, layer, head, true) }, label);
  const score = (value) => (value === null ? "–" : String(Number(value.toPrecision(4))).replace("-", "−"));
  const findings = document.getElementById("findings");
  data.models.forEach((model, m) => {
    const list = make("ol", {}, ...model.findings.map((finding) =>
      make("li", {}, make("span", { class: "topic" }, finding.topic), make("div", {}, finding.text,
        finding.heads.length ? make("div", { class: "chips" }, ...finding.heads.map((head) => chip(m, head)), finding.more ? make("span", { class: "quiet" }, `and ${finding.more} more`) : null) : null))));
    const alpha = model.sites.some((site) => site.alpha_mean !== null);
    const header = make("tr", {}, make("th", {}, "Site"), make("th", {}, "Density"), make("th", {}, "Keys per query"), make("th", {}, "Jensen–Shannon divergence (JS)"), alpha ? make("th", {}, "Mean α") : null);
    const body = model.sites.map((site) => make("tr", {},
      make("td", {}, make("span", { class: "dot", style: `background:${siteVariable[site.site]}` }), siteName(site.site).replace("-attention", "")),
      make("td", { class: "meter", style: `background-size:${(100 * (site.density || 0)).toFixed(1)}% calc(100% - 6px)` }, percent(site.density)),
      make("td", {}, fixed(site.mean_support, 1)), make("td", {}, fixed(site.head_diversity)), alpha ? make("td", {}, fixed(site.alpha_mean)) : null));
    const box = make("div", { class: "sitebox" }, make("table", {}, make("thead", {}, header), make("tbody", {}, ...body)));
    const scores = Object.entries(model.scores);
    if (scores.length) box.append(make("p", { class: "facts scores" }, ...scores.map(([name, value]) => make("span", {}, `${name} `, make("b", {}, score(value))))));
    findings.append(make("div", { class: "findings" }, make("div", {}, several ? make("p", { class: "model-name" }, model.name) : null, list), box));
  });

  /* ---------- maps of heads ---------- */
  const shade = (value, [low, high]) => (high > low ? Math.max(0, Math.min(1, (value - low) / (high - low))) : 1);
  const paint = (cell, row) => {
    cell.textContent = "";
    cell.classList.remove("pale");
    let title = headLabel(row.site, row.layer, row.head);
    if (metric === "role") {
      const look = row.role && roleLook[row.role];
      cell.style.background = look ? look[1] : "var(--empty)";
      cell.textContent = look ? look[0] : "";
      title += row.role ? `: ${roleName(row.site, row.role)}, strength ${fixed(row.role_strength)}` : ": no single role";
    } else {
      const value = row[metric];
      const known = value !== null && value !== undefined;
      const strength = known ? shade(value, range[metric]) : 0;
      cell.style.background = known ? `rgba(var(--ramp), ${(0.08 + 0.92 * strength).toFixed(3)})` : "var(--empty)";
      title += `: ${known ? metrics.find(([key]) => key === metric)[2](value) : "not measured"}`;
    }
    cell.title = title;
    cell.setAttribute("aria-label", title);
  };
  const legend = (box, model) => {
    if (metric === "role") {
      const seen = [...new Set(model.heads.filter((head) => head.role).map((head) => `${head.site === "cross" ? "cross" : ""}/${head.role}`))];
      const entries = new Map(seen.map((key) => { const [site, role] = key.split("/"); return [roleName(site, role), roleLook[role]]; }));
      box.replaceChildren(...[...entries].map(([name, look]) => make("span", {}, make("i", { style: `background:${look[1]}` }, look[0]), name)),
        make("span", {}, make("i", { style: "background:var(--empty)" }), "no single role"));
    } else {
      const [low, high] = range[metric];
      const format = metrics.find(([key]) => key === metric)[2];
      box.replaceChildren(make("span", {}, format(low)), make("span", { class: "ramp", style: "background:linear-gradient(90deg, rgba(var(--ramp), .08), rgba(var(--ramp), 1))" }), make("span", {}, format(high)));
    }
  };

  /* What is worth a first look: a head with a strong role that is not resting on the first token or on special ones. */
  const resting = new Set(["first", "special", "punctuation"]);
  const interest = (row) => (row.role_strength || 0) * (resting.has(row.role) ? 0.1 : 1) + 0.01 * (1 - (row.density ?? 1));

  /* The heads that a search means: "1.3", "cross 1.3", or a part of the name of a role or site. */
  const found = (model, text) => {
    const wanted = text.trim().toLowerCase();
    const place = /(\d+)\.(\d+)\s*$/.exec(wanted);
    const word = (place ? wanted.slice(0, place.index) : wanted).trim();
    return wanted ? model.heads.filter((row) => (!place || (row.layer === Number(place[1]) && row.head === Number(place[2])))
      && (!word || siteName(row.site).toLowerCase().includes(word) || (row.role && roleName(row.site, row.role).toLowerCase().includes(word))))
      .sort((a, b) => interest(b) - interest(a)) : [];
  };

  /* ---------- one pane: the maps of a model and its viewer ---------- */
  const buildPane = (initial) => {
    const pane = { m: initial, site: null, layer: 0, head: 0, example: 0, view: "arcs", least: 0 };
    const maps = make("div", { class: "maps" });
    const viewer = make("div", { class: "viewer" });
    const picker = several ? make("p", { class: "modelpick" }, make("select", { "aria-label": "Model", onchange: (event) => { pane.m = Number(event.target.value); pane.reset(); } },
      ...data.models.map((model, m) => make("option", { value: m, selected: m === initial }, model.name)))) : null;
    const search = make("input", { type: "search", placeholder: "find a head: 1.3, induction, cross", "aria-label": "Find a head", oninput: (event) => {
      const [row] = found(data.models[pane.m], event.target.value);
      if (row) choose(pane.m, row.site, row.layer, row.head, false, pane);
      event.target.classList.toggle("missing", Boolean(event.target.value.trim()) && !row);
    } });
    const element = make("div", { class: "pane" }, picker, make("p", { class: "headsearch" }, search), maps, viewer);
    const title = make("h3"), facts = make("p", { class: "facts" }), stage = make("div", { class: "stage" }), status = make("p", { class: "quiet", "aria-live": "polite" }), side = make("div", { class: "side" });
    const sentence = make("select", { "aria-label": "Sentence", onchange: (event) => { pane.example = Number(event.target.value); pane.show(); follow(pane); } });
    const controls = make("div", { class: "controls" });
    const slider = make("input", { type: "range", min: 0, max: 50, value: 0, step: 1, "aria-label": "Hide weights below", oninput: (event) => { pane.least = Number(event.target.value) / 100; pane.show(); follow(pane); } });
    const least = make("span", {});
    const views = make("span", { class: "segments" }, ...["arcs", "matrix"].map((view) => make("button", { type: "button", "data-view": view, onclick: () => { pane.view = view; pane.show(); follow(pane); } }, view)));
    controls.append(sentence, views, make("label", {}, "hide below", slider, least));
    viewer.append(title, facts, controls, stage, status, side);

    pane.reset = () => {
      const model = data.models[pane.m];
      maps.replaceChildren(...model.sites.map(({ site, layers }) => {
        const rows = model.heads.filter((head) => head.site === site);
        const heads = Math.max(...rows.map((row) => row.head)) + 1;
        const grid = make("div", { class: "grid", style: `grid-template-columns:18px repeat(${heads}, var(--cell));--cell:${heads > 16 ? 15 : several ? 17 : heads > 12 ? 20 : 26}px` });
        for (let layer = 0; layer < layers; layer += 1) {
          grid.append(make("span", {}, String(layer)));
          for (let head = 0; head < heads; head += 1) {
            const row = model.byHead.get(`${site}/${layer}/${head}`);
            if (!row) { grid.append(make("span")); continue; }
            grid.append(make("button", { class: "cell", type: "button", "data-cell": `${site}/${layer}/${head}`, onclick: () => choose(pane.m, site, layer, head, false, pane) }));
          }
        }
        grid.append(make("span"), ...Array.from({ length: heads }, (_, head) => make("span", {}, String(head))));
        grid.addEventListener("keydown", (event) => {
          const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
          if (!step || pane.site !== site || !model.byHead.has(`${site}/${pane.layer + step[0]}/${pane.head + step[1]}`)) return;
          event.preventDefault();
          choose(pane.m, site, pane.layer + step[0], pane.head + step[1], false, pane);
          maps.querySelector('[aria-pressed="true"]')?.focus();
        });
        return make("div", { class: "map", style: `--site:${siteVariable[site]}` }, make("h3", {}, siteName(site)), grid);
      }), make("div", { class: "legend" }));
      sentence.replaceChildren(...model.examples.map((example, index) => make("option", { value: index }, example.target ? `${example.text}  →  ${example.target}` : example.text)));
      sentence.hidden = !model.examples.length;
      pane.example = Math.min(pane.example, Math.max(model.examples.length - 1, 0));
      if (model.examples.length) sentence.value = pane.example;
      if (!pane.site && panes.length) [pane.site, pane.layer, pane.head] = [panes[0].site, panes[0].layer, panes[0].head];
      const same = pane.site && model.byHead.has(`${pane.site}/${pane.layer}/${pane.head}`);
      const start = same ? model.byHead.get(`${pane.site}/${pane.layer}/${pane.head}`) : [...model.heads].sort((a, b) => interest(b) - interest(a))[0];
      [pane.site, pane.layer, pane.head] = [start.site, start.layer, start.head];
      pane.paint();
      pane.show();
    };
    pane.paint = () => {
      const model = data.models[pane.m];
      maps.querySelectorAll(".cell").forEach((cell) => paint(cell, model.byHead.get(cell.dataset.cell)));
      legend(maps.querySelector(".legend"), model);
    };
    pane.show = () => {
      const model = data.models[pane.m];
      const row = model.byHead.get(`${pane.site}/${pane.layer}/${pane.head}`);
      maps.querySelectorAll(".cell").forEach((cell) => cell.setAttribute("aria-pressed", cell.dataset.cell === `${pane.site}/${pane.layer}/${pane.head}`));
      viewer.style.setProperty("--site", siteVariable[pane.site]);
      title.textContent = `${siteName(pane.site)}, layer ${pane.layer}, head ${pane.head}`;
      const fact = (label, value) => (value === "–" ? null : make("span", {}, `${label} `, make("b", {}, value)));
      facts.replaceChildren(...[
        hasRoles(model, pane.site) ? fact("role", row.role ? roleName(row.site, row.role) : "none") : null, fact("density", percent(row.density)), fact("α", fixed(row.alpha)),
        fact("keys per query", fixed(row.mean_support, 1)), fact("largest weight", percent(row.max_weight)), fact("entropy", row.entropy === null ? "–" : fixed(row.entropy) + " nats"),
      ].filter(Boolean));
      views.querySelectorAll("button").forEach((button) => button.setAttribute("aria-pressed", button.dataset.view === pane.view));
      least.textContent = percent(pane.least, 0);
      const packed = model.examples[pane.example]?.sites[pane.site];
      controls.hidden = !model.examples.length;
      stage.hidden = !packed;
      status.hidden = !model.examples.length;
      if (packed) {
        const keys = packed.keys || packed.queries;
        const weights = headWeights(packed, pane.layer, pane.head);
        let nonzero = 0;
        for (const value of weights) if (value) nonzero += 1;
        const t = packed.queries.length;
        const possible = pane.site === "decoder_self" ? (t * (t + 1)) / 2 : t * keys.length;
        const shown = pane.view === "arcs" ? drawArcs(stage, packed.queries, keys, weights, pane.site === "cross", pane.least) : drawMatrix(stage, packed.queries, keys, weights, pane.least);
        const how = pane.view === "matrix" ? "Rows look at columns." : pane.site === "cross" ? "Target above, source below. Point at a token to see only where it looks." : "Arcs above look back, arcs below look ahead, a ring looks at itself. Point at a token to see only where it looks.";
        status.textContent = `${nonzero} of ${possible} weights are not zero (${percent(nonzero / possible)})${shown < nonzero ? `, ${shown} drawn` : ""}. ${how}`;
      } else {
        stage.replaceChildren();
        status.textContent = "This sentence has no attention of that site.";
      }
      const ranked = model.ranked[pane.site][pane.layer][pane.head];
      const bars = make("div", { class: "bars" }, ...ranked.flatMap(([role, score, chance, , evidence]) => [
        make("span", {}, roleName(pane.site, role)),
        make("span", { class: "track", title: `${evidence} queries` }, make("span", { class: "fill", style: `width:${(100 * score).toFixed(1)}%` }), make("span", { class: "chance", style: `left:${(100 * chance).toFixed(1)}%`, title: `chance ${percent(chance)}` })),
        make("span", { class: "value" }, percent(score)),
      ]));
      const distances = model.profiles[pane.site][pane.layer][pane.head];
      side.replaceChildren(...[
        ranked.length ? make("div", {}, make("h4", {}, "Weight on the keys of each role, mark = chance"), bars) : null,
        distances.some((value) => value !== null) ? make("div", {}, make("h4", {}, "Distance of the keys looked at"), profile(distances)) : null].filter(Boolean));
      side.hidden = !side.childElementCount;
    };
    pane.element = element;
    pane.reset();
    return pane;
  };

  const profile = (values) => {
    const reach = (values.length - 3) / 2;
    const [width, height, bar] = [290, 84, 290 / values.length];
    const top = Math.max(...values, 0.05);
    const svg = draw("svg", { class: "mini", viewBox: `0 0 ${width} ${height + 18}`, width: "100%", style: "max-width:340px", role: "img", "aria-label": "distance profile" });
    values.forEach((value, index) => {
      const size = (value / top) * height;
      const rect = draw("rect", { x: index * bar + 0.7, y: height - size, width: bar - 1.4, height: Math.max(size, 0.4), rx: 1 });
      const offset = index - reach - 1;
      const name = offset < -reach ? `more than ${reach} back` : offset > reach ? `more than ${reach} ahead` : offset === 0 ? "same position" : `${Math.abs(offset)} ${offset < 0 ? "back" : "ahead"}`;
      rect.append(draw("title", {}, `${name}: ${percent(value)}`));
      svg.append(rect);
    });
    for (const offset of [-reach, -Math.round(reach / 2), 0, Math.round(reach / 2), reach])
      svg.append(draw("text", { x: (offset + reach + 1.5) * bar, y: height + 13, "text-anchor": "middle" }, offset > 0 ? `+${offset}` : String(offset).replace("-", "−")));
    svg.append(draw("text", { x: values.indexOf(Math.max(...values)) > values.length / 2 ? 0 : width, y: 9, "text-anchor": values.indexOf(Math.max(...values)) > values.length / 2 ? "start" : "end" }, `highest ${percent(Math.max(...values))}`));
    return svg;
  };

  /* Models side by side show the same head and the same sentence unless told otherwise. */
  const follow = (leader) => {
    if (!linked) return;
    for (const pane of panes) {
      const model = data.models[pane.m];
      if (pane === leader || !model.byHead.has(`${leader.site}/${leader.layer}/${leader.head}`)) continue;
      [pane.site, pane.layer, pane.head, pane.view, pane.least] = [leader.site, leader.layer, leader.head, leader.view, leader.least];
      const text = data.models[leader.m].examples[leader.example]?.text;
      const same = model.examples.findIndex((example) => example.text === text);
      if (same >= 0) pane.example = same;
      pane.element.querySelector('.viewer select').value = pane.example;
      pane.element.querySelector('input[type="range"]').value = Math.round(100 * pane.least);
      pane.show();
    }
  };

  const choose = (m, site, layer, head, jump, only) => {
    for (const pane of panes) {
      if (only ? pane !== only : pane.m !== m && panes.some((other) => other.m === m)) continue;
      if (pane.m !== m) {
        pane.m = m;
        const select = pane.element.querySelector(".modelpick select");
        if (select) select.value = m;
        pane.reset();
      }
      [pane.site, pane.layer, pane.head] = [site, layer, head];
      pane.show();
      follow(pane);
      if (!only) break;
    }
    table?.mark(panes.map((pane) => `${pane.m}/${pane.site}/${pane.layer}/${pane.head}`));
    if (jump) document.getElementById("heads").scrollIntoView();
  };

  const box = document.getElementById("panes");
  const shownPanes = several ? 2 : 1;
  box.classList.toggle("two", several);
  for (let place = 0; place < shownPanes; place += 1) {
    const pane = buildPane(place);
    panes.push(pane);
    box.append(pane.element);
  }
  const segments = make("span", { class: "segments" }, ...metrics.map(([key, label]) =>
    make("button", { type: "button", "data-metric": key, "aria-pressed": String(key === metric), onclick: () => {
      metric = key;
      segments.querySelectorAll("button").forEach((button) => button.setAttribute("aria-pressed", button.dataset.metric === metric));
      panes.forEach((pane) => pane.paint());
    } }, label)));
  document.getElementById("metrics").append(make("span", { class: "quiet" }, "Colour by"), segments);
  if (several) document.getElementById("metrics").append(make("label", { class: "quiet" },
    make("input", { type: "checkbox", checked: true, id: "linked", onchange: (event) => { linked = event.target.checked; if (linked) follow(panes[0]); } }), " same head in both"));

  table = buildHeadTable(data, choose, roleName);
  table.mark(panes.map((pane) => `${pane.m}/${pane.site}/${pane.layer}/${pane.head}`));

  /* ---------- comparison ---------- */
  if (several) {
    const lines = [["density", "Density", percent], ["mean_support", "Keys per query", (v) => fixed(v, 2)], ["entropy", "Entropy (nats)", fixed], ["max_weight", "Largest weight", percent],
      ["head_diversity", "Head diversity (JS, log heads)", (v) => fixed(v, 3)], ["alpha_mean", "Mean α", fixed]];
    const body = [...new Set(data.models.flatMap((model) => Object.keys(model.scores)))].map((name) => make("tr", {}, make("td", {}, "Whole model"), make("td", { class: "text" }, name),
      ...data.models.map((model) => make("td", {}, score(model.scores[name] ?? null)))));
    for (const site of Object.keys(data.sites)) {
      if (!data.models.some((model) => model.sites.some((row) => row.site === site))) continue;
      for (const [key, label, format] of lines) {
        const values = data.models.map((model) => model.sites.find((row) => row.site === site)?.[key] ?? null);
        if (values.every((value) => value === null)) continue;
        const fresh = body.length === 0 || body.at(-1).dataset.site !== site;
        body.push(make("tr", { "data-site": site }, fresh ? make("td", {}, make("span", { class: "dot", style: `background:${siteVariable[site]}` }), siteName(site)) : make("td"), make("td", { class: "text" }, label),
          ...values.map((value, m) => make("td", {}, format(value),
            m && value !== null && values[0] !== null ? make("span", { class: "delta" }, (value >= values[0] ? "+" : "−") + format(Math.abs(value - values[0]))) : null))));
      }
    }
    document.getElementById("comparetable").append(
      make("thead", {}, make("tr", {}, make("th", {}, "Site"), make("th", { class: "text" }, ""), ...data.models.map((model) => make("th", {}, model.name)))), make("tbody", {}, ...body));
    document.getElementById("comparetext").append(...data.comparison.map((finding) => make("li", {}, finding.text)));
  }

  /* ---------- gold data and contrasts ---------- */
  const hideUnless = (what, present) => document.querySelectorAll(`[data-needs="${what}"]`).forEach((element) => { element.hidden = !present; });
  const gold = document.getElementById("goldbody");
  let hasGold = false;
  data.models.forEach((model, m) => {
    const boxes = [];
    const relations = [...model.relations].filter((row) => row.count >= 5).sort((a, b) => b.count - a.count);
    if (relations.length) {
      const base = Object.entries(model.baselines).map(([site, [offset, value]]) => `${siteName(site)}: always looking ${Math.abs(offset)} word${Math.abs(offset) === 1 ? "" : "s"} ${offset < 0 ? "back" : "ahead"} finds ${percent(value)} of the heads.`).join(" ");
      boxes.push(make("div", {}, make("h3", {}, "Best head per dependency relation"), make("p", { class: "quiet" }, base), make("div", { class: "scroll" }, make("table", {},
        make("thead", {}, make("tr", {}, make("th", {}, "Relation"), make("th", {}, "Words"), make("th", {}, "Accuracy"), make("th", { class: "text" }, "Best head"))),
        make("tbody", {}, ...relations.map((row) => make("tr", {}, make("td", {}, row.relation), make("td", {}, row.count.toLocaleString("en")),
          make("td", { class: "meter", style: `background-size:${(100 * row.accuracy).toFixed(1)}% calc(100% - 6px)` }, percent(row.accuracy)),
          make("td", { class: "text" }, chip(m, [row.site, row.best_layer, row.best_head, headLabel(row.site, row.best_layer, row.best_head)])))))))));
    }
    const aligned = model.heads.filter((head) => head.aer_argmax_output !== undefined && head.aer_argmax_output !== null);
    if (aligned.length) {
      const best = (row) => Math.min(...["argmax", "support"].flatMap((method) => ["output", "input"].map((step) => row[`aer_${method}_${step}`] ?? 1)));
      const rows = aligned.sort((a, b) => best(a) - best(b)).slice(0, 12);
      boxes.push(make("div", {}, make("h3", {}, "Heads that align source and target"), make("p", { class: "quiet" }, "Alignment error rate, lower is better; read when the target word is predicted or one step later."), make("div", { class: "scroll" }, make("table", {},
        make("thead", {}, make("tr", {}, ...["Head", "largest", "nonzero", "largest, later", "nonzero, later"].map((name) => make("th", {}, name)))),
        make("tbody", {}, ...rows.map((row) => make("tr", {}, make("td", {}, chip(m, [row.site, row.layer, row.head, headLabel(row.site, row.layer, row.head)])),
          ...["aer_argmax_output", "aer_support_output", "aer_argmax_input", "aer_support_input"].map((key) => make("td", {}, percent(row[key]))))))))));
    }
    if (!boxes.length) return;
    hasGold = true;
    if (several) gold.append(make("p", { class: "model-name" }, model.name));
    gold.append(make("div", { class: "two-tables" }, ...boxes));
  });
  hideUnless("gold", hasGold);

  const contrasts = data.models.flatMap((model, m) => model.contrasts.filter((row) => row.sparse_text && row.dense_text).slice(0, several ? 4 : 8).map((row) => [m, row]));
  document.getElementById("contrasts").append(...contrasts.map(([m, row]) => make("div", { class: "contrast" },
    make("div", {}, chip(m, [row.site, row.layer, row.head, headLabel(row.site, row.layer, row.head)]), several ? make("div", { class: "quiet" }, data.models[m].name) : null),
    make("div", {}, make("p", {}, make("span", { class: "pct" }, percent(row.sparse_density)), row.sparse_text), make("p", {}, make("span", { class: "pct" }, percent(row.dense_density)), row.dense_text)))));
  hideUnless("contrasts", contrasts.length > 0);

  /* ---------- theme ---------- */
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  document.documentElement.dataset.ready = "true";
})();
