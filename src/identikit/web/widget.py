"""A result as a widget in a notebook."""

import anywidget
import traitlets

from identikit.results.result import Result
from identikit.web.bundle import bundle, style
from identikit.web.payload import packed


class Widget(anywidget.AnyWidget):
    """The views of a result, in a notebook cell; everything that they need is sent to it."""

    _esm = f"{bundle('widget.js')}\nexport default {{ render: renderWidget }};\n"
    _css = style()
    data = traitlets.Bytes().tag(sync=True)


def widget(result: Result) -> Widget:
    """Return the widget of a result."""
    return Widget(data=packed(result))
