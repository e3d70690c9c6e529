"""The tables that each command writes, as `docs/tables.md` lists them."""

from collections.abc import Mapping

from identikit.attention.tables import ATTENTION
from identikit.attribution.tables import ATTRIBUTION
from identikit.results.table import DataTable
from identikit.tokens.tables import INVERSION, TOKENS

TABLES: Mapping[str, Mapping[str, DataTable]] = {
    "attention": ATTENTION,
    "attribution": ATTRIBUTION,
    "tokens": TOKENS,
    "tokens --experiment inversion": INVERSION,
}
