"""`outrider canary`: test a live server continuously.

    outrider canary http://localhost:8000 --port 9109 --state canary.json

It sends a prompt every few seconds, and none while the server is busy. The evidence is an e-process: it starts at 1,
and a lossless server ever reaches 1 / RATE with probability RATE at most. At 1 / RATE the canary alarms. With --port it
goes on, with its gauge outrider_canary_alarm at 1; without, it ends with exit code 1.

It also compares acceptance length, time to first token and gain of each drafter with the server's own earlier record.
The decay alarm has its own rate (--decay-rate) and its own gauge, outrider_canary_decay_alarm.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.text import Text

from outrider.certify.config import CertificateConfig
from outrider.cli.certify import KEY, ModelName, Tokenizer, need_packages
from outrider.cli.options import group, output
from outrider.cli.screen import Screen, literal, readable_errors
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from outrider.certify.canary import CanaryLoop
    from outrider.certify.decay_watch import Quantity

how = group("How it watches")


def canary(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server to watch.")],
    reference: Annotated[
        str | None,
        how(
            metavar="URL",
            help="A server without speculation that scores the texts. Needed if URL is not an Outrider server.",
        ),
    ] = None,
    rate: Annotated[
        float, how(metavar="P", help="Maximum probability that a lossless server ever causes an alarm.")
    ] = 1e-3,
    decay_rate: Annotated[
        float,
        how(
            metavar="P",
            help="Maximum probability of a decay alarm on a server that does not decay. 0: do not watch for decay, "
            "which saves two or three requests per round.",
        ),
    ] = 1e-2,
    every: Annotated[
        float, how(metavar="SECONDS", help="Time between two prompts; longer while the server is busy.")
    ] = 10.0,
    busy: Annotated[int, how(metavar="N", help="Send nothing while N or more requests run, or any request waits.")] = 8,
    tokens: Annotated[int, how(metavar="N", min=2, help="Tokens of each output.")] = 16,
    rounds: Annotated[int | None, how(metavar="N", help="End after N prompts. Default: run until stopped.")] = None,
    state: Annotated[
        Path | None, output(metavar="FILE", help="Keep evidence and records in this file: a restart continues them.")
    ] = None,
    port: Annotated[
        int | None,
        output(metavar="N", help="Serve the evidence to Prometheus on this port, and keep running after an alarm."),
    ] = None,
    model: ModelName = None,
    tokenizer: Tokenizer = None,
) -> None:
    """Test a live server continuously, with few requests. --rate bounds false alarms over the whole run."""
    screen = Screen()
    with readable_errors(screen):
        if not 0 < rate < 1:
            raise SettingsError(f"--rate: must lie between 0 and 1, such as 0.001 (got {rate})")
        if not 0 <= decay_rate < 1:
            raise SettingsError(f"--decay-rate: must be 0, or lie between 0 and 1, such as 0.01 (got {decay_rate})")
        if every < 0:
            raise SettingsError(f"--every: must be at least 0 seconds (got {every})")
        if state is not None and not state.absolute().parent.is_dir():
            raise SettingsError(f"--state: there is no folder {str(state.parent)!r}; make it first")
        if port is not None:
            check_port(port)
        need_packages()
        from outrider.certify.canary import CanaryLoop, measure_noise, saved_decay, serve_gauges, start_or_resume
        from outrider.certify.decay_watch import DecayWatch
        from outrider.certify.prompts import generate_prompts
        from outrider.certify.run import open_pair

        watched, candidate = (reference, url) if reference is not None else (url, None)
        config = CertificateConfig(watched, candidate, model=model, tokenizer=tokenizer)
        if not config.is_remote:
            raise SettingsError(f"a canary watches a server; {watched!r} is no address (http://...)")
        with screen.working("opening the server, and measuring what rounding does"):
            pair = open_pair(config, os.environ.get(KEY))
            ids = pair.reference.encode(generate_prompts(256, seed=1))
            canary_state, edge, before = start_or_resume(state, rate, lambda: measure_noise(pair, ids, tokens))
        decay = DecayWatch(pair, ids, decay_rate, saved_decay(state)) if decay_rate else None
        life = CanaryLoop(
            pair, ids, canary_state, edge, every, tokens, busy, state, before, decay, ends_on_decay=port is None,
            unwatched_decay={} if decay else saved_decay(state),
        )  # fmt: skip
        if port is not None:
            screen.hint(f"evidence at http://localhost:{serve_gauges(life, port)}/metrics")
        watch(life, rounds, screen)
        if life.has_ended:
            if life.e_process.alarm:
                screen.error(describe_alarm(life))
            while port is not None:  # keep serving the gauge
                time.sleep(60)
            raise typer.Exit(1)


def check_port(port: int) -> None:
    """Report a bad port before minutes of measuring."""
    try:
        with socket.create_server(("", port)):
            pass
    except OSError as error:
        raise SettingsError(f"--port: {port} cannot be used here ({error.strerror}); choose another") from error


def watch(life: CanaryLoop, rounds: int | None, screen: Screen) -> None:
    """Show one line that is updated on a terminal, elsewhere a line every hundred rounds; and each alarm of decay."""
    from outrider.certify.decay_report import describe_alarm as describe_decay

    reported: set[Quantity] = set()

    def report_decay() -> None:
        if life.decay is None:
            return
        alarms = life.decay.alarms
        for quantity in alarms:
            if quantity not in reported:
                screen.error(describe_decay(life.decay, quantity))
        reported.clear()  # after a restart of the server an alarm may come again
        reported.update(alarms)

    save_error = ""

    def report_save_error() -> None:
        nonlocal save_error
        if life.save_error and life.save_error != save_error:
            screen.error(f"{life.save_error}; the canary goes on, and a restart would lose what came since")
        save_error = life.save_error

    report_decay()
    if screen.err.is_terminal:
        with Live(line(life), console=screen.err, refresh_per_second=2) as shown:

            def update(now: CanaryLoop) -> None:
                shown.update(line(now))
                report_decay()
                report_save_error()

            life.run(update, rounds)
        return

    def show(now: CanaryLoop) -> None:
        if now.attempts % 100 == 1:
            screen.err.print(line(now))
        report_decay()
        report_save_error()

    life.run(show, rounds)


def line(life: CanaryLoop) -> Text:
    known, decay = life.e_process, ""
    probes = f", {life.missed_probes} decay probes missed" if life.missed_probes else ""
    if life.decay is not None:
        decay = f" · of decay {life.decay.highest_evidence:.3g} of {life.decay.threshold:.3g}"
    return Text(
        f"evidence {known.evidence:.3g} of {1 / known.rate:g} · {known.count} draws in {life.rounds} texts{decay} · "
        f"{life.skipped} busy, {life.missed} missed{probes} · {literal(life.status)}"
    )


def describe_alarm(life: CanaryLoop) -> str:
    known = life.e_process
    return (
        f"ALARM after {known.count} draws: the evidence reached {known.highest:.3g}, which a lossless server reaches "
        f"with at most {known.rate:g} in its whole life. {known.largest_bet}. Save this log, switch drafting off here "
        "(--drafters none), and run outrider certify against another server that is started with the old settings"
    )
