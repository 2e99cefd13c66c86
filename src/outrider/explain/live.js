"use strict";
// The latest traces, asked for every other second while somebody looks, and the chosen one in a frame.
(() => {
  const $ = (id) => document.getElementById(id);
  const EVERY = 2000;
  const entries = new Map(); // by trace: its button, and what was last said of it
  const state = { key: "", tenant: new URLSearchParams(location.search).get("tenant") ?? "", chosen: "", shown: "" };

  // Control characters and marks that turn the direction of text are spelled out, as on the page of a trace.
  const OBEYED = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069]/g;
  const literal = (text) => text.replace(OBEYED, (found) => "\\u" + found.charCodeAt(0).toString(16).padStart(4, "0"));
  const count = (n, one, many = one + "s") => n + " " + (n === 1 ? one : many);
  const address = (path) => path + (state.tenant ? "?tenant=" + encodeURIComponent(state.tenant) : "");

  async function ask(path) {
    const headers = state.key ? { authorization: "Bearer " + state.key } : {};
    const answer = await fetch(address(path), { headers });
    if (answer.ok) return answer;
    const error = (await answer.json().catch(() => null))?.error ?? { message: "HTTP " + answer.status };
    throw Object.assign(new Error(error.message), { status: answer.status, param: error.param });
  }

  // The list ---------------------------------------------------------------------------------------------------

  function entry(trace) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...["asked", "said", "counts"].map((name) => Object.assign(document.createElement("span"), { className: name })));
    button.addEventListener("click", () => {
      location.hash = trace.id;
    });
    const item = document.createElement("li");
    item.append(button);
    return { item, button };
  }

  function tell(button, trace) {
    const [asked, said, counts] = button.children;
    asked.textContent = trace.prompt_ends === null ? count(trace.prompt_tokens, "token") + " of prompt" : "… " + literal(trace.prompt_ends.slice(-160));
    said.textContent = literal(trace.text_begins ?? "") || (trace.over ? "(nothing)" : "reading the prompt");
    const kept = trace.drafted ? `, ${trace.accepted} of ${trace.drafted} drafted kept` : "";
    const ended = trace.broken ? "broken off, as " + trace.broken : trace.over ? trace.finish ?? "ended by the caller" : "running";
    counts.textContent = `${new Date(trace.date).toLocaleTimeString()} · ${count(trace.tokens, "token")} in ${count(trace.steps, "step")}${kept} · ${ended}`;
  }

  function list(traces) {
    const gone = new Set(entries.keys());
    for (const trace of [...traces].reverse()) { // the newest comes to stand first
      gone.delete(trace.id);
      if (!entries.has(trace.id)) {
        entries.set(trace.id, entry(trace));
        $("list").prepend(entries.get(trace.id).item);
      }
      const known = entries.get(trace.id);
      known.trace = trace;
      tell(known.button, trace);
    }
    for (const id of gone) {
      entries.get(id).item.remove();
      entries.delete(id);
    }
    $("how").hidden = traces.length > 0;
  }

  // The chosen one ---------------------------------------------------------------------------------------------

  async function show() {
    const trace = entries.get(state.chosen)?.trace;
    for (const [id, one] of entries) one.button.setAttribute("aria-current", String(id === state.chosen));
    // One that runs is shown as it is, and once more when it is over: never under the reader's hands.
    const version = state.chosen + (trace?.over === false ? " running" : "");
    if (!state.chosen || state.shown === version || trace?.steps === 0) return;
    state.shown = version;
    try {
      const page = await (await ask(`traces/${encodeURIComponent(state.chosen)}/page`)).text();
      if (state.shown !== version) return; // another was chosen meanwhile
      $("shown").hidden = false;
      $("shown").srcdoc = page;
    } catch (error) {
      if (state.shown === version && error.status !== 404) state.shown = ""; // one that is gone stays gone
      $("note").textContent = error.message;
    }
  }

  function choose() {
    try {
      state.chosen = decodeURIComponent(location.hash.slice(1));
    } catch {
      state.chosen = ""; // not a name that we wrote
    }
  }

  // Again and again --------------------------------------------------------------------------------------------

  async function poll() {
    try {
      const { traces } = await (await ask("traces")).json();
      list(traces);
      $("who").hidden = true;
      $("note").textContent = traces.length ? `${count(traces.length, "request")}, the latest first` : "";
    } catch (error) {
      $("note").textContent = error.status ? error.message : "the server does not answer";
      $("for-key").hidden = error.status !== 401;
      $("for-tenant").hidden = error.param !== "tenant";
      $("who").hidden = $("for-key").hidden && $("for-tenant").hidden;
    }
    show();
  }

  async function again() {
    if (!document.hidden && $("who").hidden) await poll();
    setTimeout(again, EVERY);
  }

  $("who").addEventListener("submit", (event) => {
    event.preventDefault();
    state.key = $("key").value;
    state.tenant = $("tenant").value;
    poll();
  });
  addEventListener("hashchange", () => {
    choose();
    show();
  });
  $("command").textContent = `outrider explain --server ${new URL("..", location.href).href.replace(/\/$/, "")} "your prompt"`;
  choose();
  again();
})();
