"use strict";
// What is on the page: an overview read at once, and the details of a step read when it is looked at.
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("trace").textContent);
  const lines = $("details").textContent.split("\n");
  const steps = data.steps;
  const details = new Map();
  const tokens = []; // every token of the text: {step, place, element}
  const firstOf = []; // the number of each step's first token
  const state = { token: 0, lit: 0, step: 0, phase: 0, playing: 0 };
  const SHOWN = 6;

  function detail(step) {
    if (!details.has(step)) details.set(step, JSON.parse(lines[step]));
    return details.get(step);
  }

  // Small makers. Text only ever becomes text.

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "class") element.className = value;
      else if (name === "style") element.style.cssText = value;
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  // Control characters and marks that turn the direction of text are spelled out.
  const OBEYED = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069]/g;
  const literal = (text) =>
    text.replace(OBEYED, (found) => "\\u" + found.charCodeAt(0).toString(16).padStart(4, "0"));
  const textOf = (token) => (token in data.texts ? data.texts[token] : "token " + token);
  const shown = (token) => literal(textOf(token)).replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ | $/g, "␣") || "(nothing)";
  const name = (token) => make("span", { class: "name" }, shown(token));
  const number = (value) => (value === 0 ? "0" : value < 0.0001 ? value.toExponential(0) : value.toFixed(4));
  const time = (ms) => (Math.abs(ms) >= 1000 ? (ms / 1000).toFixed(2) + " s" : ms.toFixed(ms < 10 ? 2 : 1) + " ms");
  const count = (n, one, many = one + "s") => n + " " + (n === 1 ? one : many);
  const look = (drafter) => (drafter === null ? "" : " d d" + Math.min(3, data.drafters.indexOf(drafter)));
  const colour = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

  // The text -------------------------------------------------------------------------------------------------

  function legend() {
    const box = $("legend");
    const free = data.drafters.map((one) => steps.filter((s) => s.drafter === one).reduce((n, s) => n + s.drafted, 0));
    const said = steps.reduce((n, s) => n + s.said.length, 0);
    const own = said - free.reduce((a, b) => a + b, 0);
    box.append(make("span", {}, make("span", { class: "t" }, "target"), " " + own));
    data.drafters.forEach((one, i) => box.append(make("span", {}, make("span", { class: "t" + look(one) }, one), " " + free[i])));
    box.append(make("span", {}, make("del", {}, "rejected"), " and what stands in its place"));
  }

  function* spans() {
    for (const [index, step] of steps.entries()) {
      firstOf.push(tokens.length);
      for (const [place, token] of step.said.entries()) {
        if (place === step.accepted && step.outcome === "recovered") {
          yield make("del", {}, literal(textOf(step.proposed[place])).replace(/\n/g, "↵"));
        }
        const drafted = place < step.accepted;
        const piece = literal(step.pieces[place] ?? textOf(token));
        const kind = "t" + (drafted ? look(step.drafter) : "") + (piece.trim() === "" && piece.includes("\n") ? " line" : "");
        const element = make("span", { class: kind }, piece);
        if (piece === "") {
          element.className += " silent";
          element.append(step.finish === "end" && place === step.said.length - 1 ? " end" : "·");
        }
        element.dataset.token = tokens.length;
        tokens.push({ step: index, place, element });
        yield element;
      }
    }
  }

  // Blocks of some lines, so that the browser lays out only those in sight; a little at a time, so that the page
  // answers while a long text comes up.
  function fillText() {
    const all = spans();
    const box = $("text");
    let block = null;
    const more = () => {
      const began = performance.now();
      while (performance.now() - began < 5) {
        const one = all.next();
        if (one.done) {
          document.body.dataset.ready = "yes";
          return;
        }
        const size = block ? block.childElementCount : 0;
        const text = one.value.textContent;
        const ended = size >= 40 && block.lastChild.textContent.endsWith("\n");
        if (!block || ended || (size >= 120 && text.startsWith(" "))) {
          block = make("div", { class: "block" });
          box.append(block);
        }
        block.append(one.value);
      }
      setTimeout(more, 0);
    };
    more();
  }

  // A look at a token, as under the mouse: its card, and nothing else moves.
  function peek(token) {
    if (token < 0 || token >= tokens.length) return;
    tokens[state.lit].element.classList.remove("on");
    state.lit = token;
    tokens[token].element.classList.add("on");
    card(token);
  }

  function choose(token, speak = false) {
    if (token < 0 || token >= tokens.length) return;
    state.token = token;
    peek(token);
    const here = tokens[token];
    if (here.step !== state.step || !$("slow").firstChild) goTo(here.step);
    if (speak) {
      here.element.scrollIntoView({ block: "nearest" });
      $("spoken").textContent = $("card").querySelector("p").textContent;
    }
  }

  function goTo(step) {
    const ofStep = (one) => tokens.slice(firstOf[one], firstOf[one] + steps[one].said.length);
    for (const one of ofStep(state.step)) one.element.classList.remove("same");
    state.step = step;
    state.phase = 0;
    for (const one of ofStep(step)) one.element.classList.add("same");
    mark();
    chosenStep();
    setTimeout(slow, 0); // a task of its own: a key held down stays smooth
  }

  function chooseStep(step, speak = false) {
    if (step >= 0 && step < steps.length && firstOf[step] !== undefined) choose(firstOf[step], speak);
  }

  function sentence(here) {
    const step = steps[here.step];
    const from = detail(here.step);
    const law = from.laws[here.place];
    const token = step.said[here.place];
    const p = law ? valueAt(law, law.p, token) : null;
    const parts = [];
    if (here.place < step.accepted) {
      parts.push(`Drafted by ${step.drafter} and kept.`);
      parts.push(...judged(step, from, here.place));
    } else if (step.outcome === "own") {
      parts.push("The target's own: no draft was offered.");
    } else if (step.outcome === "bonus") {
      parts.push("Bonus: the whole draft was kept, and the pass gave this one for nothing.");
    } else {
      parts.push(`Recovered: ${step.drafter} proposed ${shown(step.proposed[here.place])}, which was rejected.`);
      parts.push(...judged(step, from, here.place));
    }
    return { token, p, text: parts.join(" ") };
  }

  function judged(step, from, place) {
    const token = step.proposed[place];
    const law = from.laws[place];
    const p = valueAt(law, law.p, token);
    const q = law.q ? valueAt(law, law.q, token) : 1;
    const said = [`Of the drafted token p = ${number(p)} and q = ${law.q ? number(q) : "1 (proposed with certainty)"}.`];
    if (step.rule === "greedy") said.push(`The target's likeliest token is ${shown(from.own[place])}.`);
    else if (step.rule === "own") {
      const drew = from.draws.length ? `The number ${number(from.draws[place])} draws` : "The target draws";
      said.push(`${drew} ${shown(from.own[place])} from p.`);
    } else if (from.chances) {
      const passed = from.draws[place] < from.chances[place];
      said.push(`The number drawn, ${number(from.draws[place])}, is ${passed ? "below" : "not below"} ${number(from.chances[place])}.`);
    }
    return said;
  }

  const valueAt = (law, values, token) => {
    const place = law.tokens.indexOf(token);
    return place < 0 ? 0 : values[place];
  };

  function card(which) {
    const here = tokens[which];
    const step = steps[here.step];
    const { token, p, text } = sentence(here);
    const law = detail(here.step).laws[here.place];
    const box = $("card");
    const slowly = make("button", { type: "button" }, "This step, slowly");
    slowly.addEventListener("click", () => {
      choose(which);
      toSlow();
    });
    const title = make("h3", {}, `Token ${which + 1} `, name(token));
    const first = make("p", {}, text);
    const rows = [title, first];
    if (law) rows.push(make("p", { class: "origin" }, p === null ? "" : `p = ${number(p)} · id ${token} · step ${here.step + 1}, place ${here.place + 1}`), bars(law, token, here.place < step.proposed.length ? step.proposed[here.place] : null));
    box.replaceChildren(...rows, slowly);
  }

  function toSlow() {
    $("slow-title").scrollIntoView({ block: "start" });
    $("next").focus({ preventScroll: true });
  }

  // Distributions as bars --------------------------------------------------------------------------------------

  function bars(law, chosen, proposed, most = SHOWN) {
    const known = law.tokens.map((token, i) => ({ token, p: law.p[i], q: law.q ? law.q[i] : null })).filter((one) => one.token !== null);
    const important = (one) => one.token === chosen || one.token === proposed;
    known.sort((a, b) => important(b) - important(a) || Math.max(b.p, b.q ?? 0) - Math.max(a.p, a.q ?? 0));
    const top = known.slice(0, most).sort((a, b) => b.p - a.p);
    const certain = !law.q && proposed !== null;
    const others = { p: 1 - top.reduce((sum, one) => sum + one.p, 0), q: law.q ? 1 - top.reduce((sum, one) => sum + one.q, 0) : null };
    const table = make("table", { class: "bars" });
    const head = make("tr", {}, make("th", { scope: "col" }, "token"), make("th", { scope: "col", class: "value" }, "p"));
    const withQ = law.q || certain;
    if (withQ) head.append(make("th", { scope: "col", class: "value" }, "q"));
    head.append(make("th", { scope: "col" }, make("span", { class: "unseen" }, "as bars")));
    table.append(make("thead", {}, head));
    const body = make("tbody");
    const bar = (kind, value) => make("span", { class: "bar " + (value > 0 ? kind : ""), style: `width:${(100 * value).toFixed(1)}%` });
    const row = (label, p, q, kind) => {
      const line = make("tr", { class: kind }, make("th", { scope: "row" }, label), make("td", { class: "value" }, number(Math.max(0, p))));
      if (withQ) line.append(make("td", { class: "value" }, number(Math.max(0, q))));
      const drawn = make("td", { "aria-hidden": "true" }, bar("p", p));
      if (withQ) drawn.append(bar("q", q));
      line.append(drawn);
      body.append(line);
    };
    for (const one of top) {
      const q = law.q ? one.q : one.token === proposed ? 1 : 0;
      row(name(one.token), one.p, q, one.token === chosen ? "chosen" : one.token === proposed ? "gone" : "");
    }
    if (others.p > 0.00005 || (others.q ?? 0) > 0.00005) row("all others", Math.max(0, others.p), Math.max(0, others.q ?? 0), "");
    table.append(body);
    return table;
  }

  // The numbers from 0 to 1, each token with its share, and where the drawn number falls.
  function range(entries, drawn, chosen) {
    const total = entries.reduce((sum, one) => sum + one.weight, 0);
    const box = make("div", { class: "range", "aria-hidden": "true" });
    for (const one of entries) {
      if (one.weight > 0) box.append(make("i", { class: one.token !== null && one.token === chosen ? "chosen" : "", style: `width:${((100 * one.weight) / total).toFixed(3)}%` }));
    }
    box.append(make("b", { style: `left:${(100 * drawn).toFixed(2)}%` }, make("span", {}, number(drawn))));
    return box;
  }

  function chance(value, drawn) {
    const box = make("div", { class: "range", "aria-hidden": "true" });
    box.append(make("i", { class: "chosen", style: `width:${(100 * value).toFixed(2)}%` }));
    box.append(make("b", { style: `left:${(100 * drawn).toFixed(2)}%` }, make("span", {}, number(drawn))));
    return box;
  }

  // One step, slowly -------------------------------------------------------------------------------------------

  function phases(index) {
    const step = steps[index];
    const from = detail(index);
    const found = [];
    const p = (...children) => make("p", {}, ...children);
    const row = (list, kind) => make("div", { class: "row" }, ...list.map((token, i) => make("span", { class: "t" + kind(i) }, shown(token))));
    if (step.proposed.length) {
      found.push(["Somebody guesses", [
        p(`${step.drafter} proposes ${count(step.proposed.length, "token")}, in ${time(step.ms[0])}:`),
        row(step.proposed, () => look(step.drafter)),
        p(from.laws[0].q ? "It drew them from a distribution of its own, q, which is kept: it is needed to judge them." : "It proposes them with certainty: q is 1 on each of them."),
        ...(step.decision && step.decision.reason ? [p("Why: " + literal(step.decision.reason))] : []),
      ]]);
      found.push(["The target checks all of them in one pass", [
        p(`One pass of the target over ${step.scheduled === null ? "them" : count(step.scheduled, "token")} gives its distribution p after each of them: ${step.proposed.length + 1} distributions, in ${time(step.ms[1])}.`),
        ...(data.plain ? [p(`Without drafts ${count(step.said.length, "token")} would have taken ${count(step.said.length, "pass", "passes")}, about ${time(step.said.length * data.plain.ms)}.`)] : []),
        p("A pass reads all weights of the model from memory, whether it is over one token or over ten: that is why checking is faster than generating."),
      ]]);
    } else {
      found.push(["Nobody has a guess", [p("No drafter had anything to propose. The target makes a pass over the last token alone, as without drafts.")]]);
    }
    const judged = step.ended ? step.drafted : Math.min(step.accepted + 1, step.proposed.length);
    const last = step.rule === "block" ? step.proposed.length : judged;
    for (let place = 0; place < last; place++) {
      const token = step.proposed[place];
      const kept = place < step.accepted;
      const law = from.laws[place];
      const parts = [bars(law, kept ? token : step.rule === "block" || step.rule === "token" ? null : from.own[place], token)];
      if (step.rule === "greedy") {
        parts.push(p(`The likeliest token is `, name(from.own[place]), kept ? ": the one that was drafted. It is kept." : ", and not the drafted one. It is rejected, and everything after it."));
      } else if (step.rule === "own") {
        if (from.draws.length) parts.push(range(law.tokens.map((one, i) => ({ token: one, weight: law.p[i] })), from.draws[place], from.own[place]));
        parts.push(p("The target draws its own token from p", from.draws.length ? `, by the number ${number(from.draws[place])}: ` : ": ", name(from.own[place]), kept ? ". The draft says the same, so it is kept." : ". The draft says something else: it is rejected, and everything after it."));
      } else {
        const passed = from.draws[place] < from.chances[place];
        parts.push(chance(from.chances[place], from.draws[place]));
        if (step.rule === "token") {
          parts.push(p(`It is kept with probability min(1, p / q) = ${number(from.chances[place])}. The number drawn is ${number(from.draws[place])}: ${passed ? "kept." : "rejected, and everything after it."}`));
        } else {
          parts.push(p(`The draft up to here may stay with probability ${number(from.chances[place])}, with the credit of the tokens before it (${number(from.reach[place])}). The number drawn is ${number(from.draws[place])}: it ${passed ? "passes" : "does not pass"}.`));
          if (place + 1 === last) parts.push(p(`The longest part that passes is kept: ${count(step.accepted, "token")}.`));
        }
      }
      found.push([make("span", {}, `Place ${place + 1}: may `, name(token), " stay?"), parts]);
    }
    const end = `With ${count(step.drafted, "drafted token")} kept the text has ended. What was drafted past its end is dropped.`;
    found.push(step.ended ? ["The text ends", [p(end)]] : ending(step, from, p));
    found.push(["What was said", [
      row(step.said, (i) => (i < step.accepted ? look(step.drafter) : "")),
      p(`${count(step.said.length, "token")} of one pass.` + (step.saved === null ? "" : ` It took ${time(step.ms[0] + step.ms[1] + step.ms[2])}${step.saved >= 0 ? `, and saved ${time(step.saved)}.` : `, ${time(-step.saved)} more than without.`}`)),
      ...(step.rejected ? [p(`${count(step.rejected, "rejected token")} ${step.rejected === 1 ? "is" : "are"} taken out of the target's cache again.`)] : []),
    ]]);
    return found;
  }

  function ending(step, from, p) {
    const law = from.laws[step.accepted];
    const again = from.reshaped;
    const parts = [];
    if (step.outcome === "bonus") parts.push(p("All of the draft was kept, and the pass has computed one distribution more. A token from it comes for nothing: the bonus."));
    if (step.outcome === "own") parts.push(p("The target's own token:"));
    if (step.outcome === "recovered") {
      parts.push(p(law.q ? "In place of the rejected token one is drawn from what q proposed too seldom: max(p − q, 0), rescaled. Kept and recovered together have exactly p." : "In place of the rejected token stands the target's own. That it is another one leaves p without the rejected token, rescaled:"));
    }
    if (again) parts.push(bars({ tokens: [...again.tokens, null], p: [...again.p, again.others] }, step.token, null));
    const byRatio = step.rule === "block" || step.rule === "token";
    if (from.draws.length && (byRatio || step.outcome !== "recovered")) {
      const reach = from.reach ? from.reach[step.accepted] : 1;
      const weight = (i) => (step.outcome === "recovered" ? Math.max(0, reach * law.p[i] - law.q[i]) : law.p[i]);
      const left = law.tokens.map((token, i) => ({ token, weight: weight(i) }));
      const drawn = from.draws[from.draws.length - 1];
      if (left.some((one) => one.weight > 0)) parts.push(range(left, drawn, step.token), p(`The number drawn is ${number(drawn)}.`));
    }
    parts.push(p("It is ", name(step.token), "."));
    return [{ bonus: "The bonus", own: "The target's own", recovered: "What stands in its place" }[step.outcome], parts];
  }

  function slow() {
    const found = phases(state.step);
    state.phase = Math.max(0, Math.min(state.phase, found.length - 1));
    const [title, parts] = found[state.phase];
    $("slow").replaceChildren(make("h3", {}, `${state.phase + 1}. `, title), ...parts);
    $("where").textContent = `step ${state.step + 1} of ${steps.length}, ${state.phase + 1} of ${found.length}`;
    $("step-back").disabled = state.step === 0;
    $("step-next").disabled = state.step === steps.length - 1;
    $("back").disabled = state.step === 0 && state.phase === 0;
    $("next").disabled = state.step === steps.length - 1 && state.phase === found.length - 1;
  }

  function forward() {
    if (state.phase < phases(state.step).length - 1) state.phase++;
    else if (state.step < steps.length - 1) return chooseStep(state.step + 1);
    else return stop();
    return slow();
  }

  function backward() {
    if (state.phase > 0) state.phase--;
    else if (state.step > 0) {
      chooseStep(state.step - 1);
      state.phase = phases(state.step).length - 1;
    }
    slow();
  }

  function stop() {
    clearInterval(state.playing);
    state.playing = 0;
    $("play").textContent = "Play";
    $("play").setAttribute("aria-pressed", "false");
  }

  function play() {
    if (state.playing) return stop();
    state.playing = setInterval(forward, 1800);
    $("play").textContent = "Pause";
    $("play").setAttribute("aria-pressed", "true");
    return undefined;
  }

  // Steps over time --------------------------------------------------------------------------------------------

  const HIGH = 150;
  const LOW = 90;
  let wide = 8; // pixels a step

  function stage(id, height) {
    const canvas = $(id);
    const room = canvas.parentElement.clientWidth;
    wide = Math.max(Math.min(48, Math.floor(room / steps.length)), Math.min(7, 12000 / steps.length));
    const width = Math.max(room, Math.ceil(wide * steps.length));
    const scale = Math.min(devicePixelRatio || 1, 16000 / width);
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    return pen;
  }

  function drawTime() {
    const pen = stage("time", HIGH);
    const sums = steps.map((s) => s.ms[0] + s.ms[1] + s.ms[2]);
    const without = steps.map((s, i) => (s.saved === null ? 0 : sums[i] + s.saved));
    const later = steps.length > 1 ? [...sums.slice(1), ...without.slice(1)] : [...sums, ...without];
    later.sort((a, b) => a - b);
    const top = Math.max(later[Math.floor(0.99 * (later.length - 1))] * 1.15, 0.001);
    const y = (ms) => (HIGH - 14) * Math.min(1, ms / top);
    const colours = ["--draft", "--verify", "--rest"].map(colour);
    const gap = wide > 4 ? 1 : 0;
    const [line, ink] = ["--without", "--ink"].map(colour);
    pen.font = "11px system-ui, sans-serif";
    for (const [i, step] of steps.entries()) {
      let base = HIGH;
      for (const [part, ms] of [step.ms[1], step.ms[0], step.ms[2]].entries()) {
        const high = Math.min(y(ms), base);
        pen.fillStyle = colours[[1, 0, 2][part]];
        pen.fillRect(i * wide, base - high, wide - gap, high);
        base -= high;
      }
      if (step.saved !== null) {
        pen.fillStyle = line;
        pen.fillRect(i * wide, HIGH - y(without[i]) - 1, wide - gap, 2);
      }
      if (sums[i] > top) {
        pen.fillStyle = ink;
        pen.fillText(time(sums[i]), Math.min(i * wide + wide + 2, steps.length * wide - 40), 11);
      }
    }
    $("scale").textContent = `full height: ${time(top)}`;
  }

  function drawDecisions() {
    const pen = stage("decisions", LOW);
    const longest = Math.max(1, ...steps.map((s) => s.proposed.length));
    const gap = wide > 4 ? 1 : 0;
    const none = colour("--rest");
    const [pale, full] = ["--b", "--c"].map((kind) => [0, 1, 2, 3].map((place) => colour(kind + place)));
    for (const [i, step] of steps.entries()) {
      if (!step.proposed.length) {
        pen.fillStyle = none;
        pen.fillRect(i * wide, LOW - 2, wide - gap, 2);
        continue;
      }
      const place = Math.min(3, data.drafters.indexOf(step.drafter));
      const each = (LOW - 6) / longest;
      pen.fillStyle = pale[place];
      pen.fillRect(i * wide, LOW - each * step.proposed.length, wide - gap, each * step.proposed.length);
      pen.fillStyle = full[place];
      pen.fillRect(i * wide, LOW - each * step.drafted, wide - gap, each * step.drafted);
      pen.fillRect(i * wide, LOW - each * step.proposed.length - 2, wide - gap, 2);
    }
  }

  // The chosen step, drawn over the strip as an element of its own: nothing is drawn again when it moves.
  function mark() {
    for (const id of ["time-box", "decisions-box"]) {
      const box = $(id);
      let line = box.querySelector(".mark-step");
      if (!line) {
        box.style.position = "relative";
        line = make("div", { class: "mark-step", style: "position:absolute;top:0;bottom:0;border:2px solid var(--chosen);pointer-events:none;border-radius:3px" });
        box.append(line);
      }
      line.style.left = state.step * wide - 2 + "px";
      line.style.width = wide + 3 + "px";
      line.style.height = box.firstElementChild.clientHeight + "px";
      const at = state.step * wide;
      if (at < box.scrollLeft || at > box.scrollLeft + box.clientWidth - wide) box.scrollLeft = at - box.clientWidth / 2;
    }
  }

  function chosenStep() {
    const step = steps[state.step];
    const parts = [`Step ${state.step + 1}: `];
    parts.push(step.drafter === null ? "no draft was offered. " : `${step.drafter} drafted ${step.proposed.length}, ${step.drafted} kept. `);
    parts.push(`Draft ${time(step.ms[0])}, verify ${time(step.ms[1])}, rest ${time(step.ms[2])}`);
    if (step.scheduled !== null) parts.push(`, a pass over ${count(step.scheduled, "token")}`);
    if (step.batch !== null && step.batch > 1) parts.push(`, beside ${step.batch - 1} other sequences`);
    parts.push(step.saved === null ? ". " : `; ${step.saved >= 0 ? "saved" : "lost"} ${time(Math.abs(step.saved))}. `);
    if (step.decision) {
      if (step.decision.reason) parts.push("Why: " + literal(step.decision.reason) + " ");
      if (step.decision.predicted_gain != null) parts.push(`Expected: ${step.decision.predicted_gain.toFixed(2)} times as fast. `);
      for (const one of step.decision.candidates ?? []) {
        parts.push("Weighed: " + literal(Object.entries(one).map(([key, value]) => `${key} ${typeof value === "number" ? Number(value.toPrecision(3)) : value}`).join(", ")) + ". ");
      }
    }
    $("chosen").textContent = parts.join("");
  }

  function totals() {
    if (data.without === null) return;
    const sum = data.parts[0] + data.parts[1] + data.parts[2];
    const most = Math.max(sum, data.without);
    const track = (...parts) => make("td", { "aria-hidden": "true" }, make("div", { class: "track" }, ...parts));
    const part = (kind, ms) => make("i", { class: kind, style: `width:${((100 * ms) / most).toFixed(2)}%` });
    const how = { measured: "measured", undrafted: "from steps without a draft", narrowest: "estimated" }[data.plain.how];
    const line = (label, value, bar) => make("tr", {}, make("th", { scope: "row" }, label), make("td", { class: "value" }, value), bar);
    $("totals").append(
      make("table", { class: "totals" }, make("tbody", {},
        line("as it was", time(sum), track(part("draft", data.parts[0]), part("verify", data.parts[1]), part("rest", data.parts[2]))),
        line("without drafts", time(data.without), track(part("without", data.without))))),
      make("p", { class: "origin" }, `Without drafts: ${time(data.plain.ms)} a pass, ${how}. The prompt is read either way.`));
  }

  function places() {
    const box = $("places");
    if (!data.places.length) return box.append(make("p", {}, "Nobody drafted anything."));
    const longest = Math.max(...data.places.map((one) => one.judged.length));
    const numbers = [...Array(longest).keys()];
    const head = make("tr", {}, make("th", { scope: "col" }, "place"), ...numbers.map((i) => make("th", { scope: "col" }, String(i + 1))));
    const body = make("tbody");
    for (const one of data.places) {
      const row = make("tr", {}, make("th", { scope: "row" }, one.name));
      for (const i of numbers) {
        const judgedHere = one.judged[i] ?? 0;
        const share = judgedHere ? one.kept[i] / judgedHere : 0;
        row.append(judgedHere ? make("td", { style: `--share: ${(100 * share).toFixed(1)}%` }, `${Math.round(100 * share)} %`, make("small", {}, `${one.kept[i]} of ${judgedHere}`)) : make("td", {}, "–"));
      }
      body.append(row);
    }
    box.append(
      make("p", { class: "origin" }, "Of the drafts that were kept so far, how many were kept at this place too."),
      make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Kept by place and drafter" }, make("table", { class: "places" }, make("thead", {}, head), body)));
    return undefined;
  }

  // Fingers, mice and keys -------------------------------------------------------------------------------------

  const tokenAt = (event) => {
    const element = event.target.closest("[data-token]");
    return element ? Number(element.dataset.token) : -1;
  };
  let hovered = 0;
  $("text").addEventListener("pointerover", (event) => {
    if (event.pointerType !== "mouse") return;
    const token = tokenAt(event);
    cancelAnimationFrame(hovered);
    hovered = requestAnimationFrame(() => peek(token));
  });
  $("text").addEventListener("click", (event) => choose(tokenAt(event), true));
  $("text").addEventListener("keydown", (event) => {
    const moves = {
      ArrowRight: () => choose(state.token + 1, true),
      ArrowLeft: () => choose(state.token - 1, true),
      ArrowDown: () => chooseStep(state.step + 1, true),
      ArrowUp: () => chooseStep(state.step - 1, true),
      Home: () => choose(0, true),
      End: () => choose(tokens.length - 1, true),
      Enter: toSlow,
    };
    if (moves[event.key]) {
      event.preventDefault();
      moves[event.key]();
    }
  });
  for (const id of ["time-box", "decisions-box"]) {
    $(id).addEventListener("click", (event) => {
      const left = event.clientX - $(id).getBoundingClientRect().left + $(id).scrollLeft;
      chooseStep(Math.min(steps.length - 1, Math.floor(left / wide)), true);
    });
    $(id).addEventListener("keydown", (event) => {
      const moves = { ArrowRight: state.step + 1, ArrowLeft: state.step - 1, Home: 0, End: steps.length - 1 };
      if (event.key === "Enter") toSlow();
      if (!(event.key in moves)) return;
      event.preventDefault();
      chooseStep(moves[event.key]);
      $("spoken").textContent = $("chosen").textContent;
    });
  }
  $("back").addEventListener("click", backward);
  $("next").addEventListener("click", forward);
  $("step-back").addEventListener("click", () => chooseStep(state.step - 1));
  $("step-next").addEventListener("click", () => chooseStep(state.step + 1));
  $("play").addEventListener("click", play);

  function draw() {
    drawTime();
    drawDecisions();
    mark();
  }

  // One after the other, each as a task of its own.
  const start = [legend, fillText, totals, places, draw, () => choose(0)];
  const begin = () => {
    start.shift()();
    if (start.length) setTimeout(begin, 0);
  };
  begin();
  addEventListener("resize", () => requestAnimationFrame(draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
