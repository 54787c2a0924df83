"""`grmoe report`: models as one HTML page with a dial that moves, texts, curves, frontiers and experts.

`facts`, `dialled`, `sample` and `writing` say what one model is and does, `story` puts the first of it into words,
`content` collects it, `page` writes the file. The page is `page.html`, `page.css` and the scripts: `slider.js` is the
first screen, `budget.js` what a budget means, `math.js` computes gates and bounds in the browser.
"""

from grmoe.report.content import Content, Note, Plan, collect
from grmoe.report.page import render
from grmoe.report.run import Report, default_path, run, save, show

__all__ = ["Content", "Note", "Plan", "Report", "collect", "default_path", "render", "run", "save", "show"]
