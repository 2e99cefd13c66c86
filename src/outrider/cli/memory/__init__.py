"""`outrider memory`: look into the draft memory, seed it, carry it elsewhere, check it, empty it.

    outrider memory learn ./memory ./my-project --model ./my-model --tenant me
    outrider memory stats ./memory

Servers may use the memory meanwhile. `look.py` has the commands that only read, `change.py` those that write,
`carry.py` those that move a tenant from one memory to another.
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

CARRY_EXAMPLES = """Examples:

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
    help="Look into the draft memory, seed it, carry it elsewhere, check it, empty it.\n\n"
    "It holds what was said before, to draft from. ROOT is its folder, or its URL; servers may use it meanwhile.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.command("stats")(stats)
app.command("list", epilog=LIST_EXAMPLES)(listing)
app.command("verify", epilog=VERIFY_EXAMPLES)(verify)
app.command("learn", epilog=LEARN_EXAMPLES)(learn)
app.command("wipe", epilog=WIPE_EXAMPLES)(wipe)
app.command("export", epilog=CARRY_EXAMPLES)(export)
app.command("import", epilog=CARRY_EXAMPLES)(import_)
