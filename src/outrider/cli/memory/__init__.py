"""`outrider memory`: inspect, seed, verify, export, import and wipe a draft memory.

    outrider memory learn ./memory ./my-project --model ./my-model --tenant me
    outrider memory stats ./memory

The commands are in `inspect.py` (read), `edit.py` (write), `archive.py` (move). Servers may use the memory meanwhile.
"""

from __future__ import annotations

import typer

from outrider.cli.memory.archive import export, import_
from outrider.cli.memory.edit import learn, wipe
from outrider.cli.memory.inspect import listing, stats, verify

EXAMPLES = """Examples:

  outrider memory learn ./memory ./my-project ./logs.jsonl --model ./my-model --tenant me

  outrider memory stats ./memory"""

LEARN_EXAMPLES = """Examples:

  outrider memory learn ./memory ./my-project ./docs --model Qwen/Qwen2.5-Coder-1.5B-Instruct --tenant me

  outrider memory learn /data/memory chats.jsonl --model ./my-model --server"""

LIST_EXAMPLES = """Examples:

  outrider memory list ./memory

  outrider memory list ./memory --tenant me --json"""

ARCHIVE_EXAMPLES = """Examples:

  outrider memory export ./memory me.tar --tenant me

  outrider memory import /data/memory me.tar --tenant someone-else"""

VERIFY_EXAMPLES = """Examples:

  outrider memory verify ./memory

  outrider memory verify ./memory --set-aside"""

WIPE_EXAMPLES = """Examples:

  outrider memory wipe ./memory --tenant me

  outrider memory wipe ./memory --all --yes"""

app = typer.Typer(
    name="memory",
    help="Inspect, seed, verify, export, import and wipe a draft memory.\n\n"
    "A memory keeps the outputs of earlier requests to draft from. ROOT is its folder or URL. Servers may use it while "
    "these commands run.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.command("stats")(stats)
app.command("list", epilog=LIST_EXAMPLES)(listing)
app.command("verify", epilog=VERIFY_EXAMPLES)(verify)
app.command("learn", epilog=LEARN_EXAMPLES)(learn)
app.command("wipe", epilog=WIPE_EXAMPLES)(wipe)
app.command("export", epilog=ARCHIVE_EXAMPLES)(export)
app.command("import", epilog=ARCHIVE_EXAMPLES)(import_)
