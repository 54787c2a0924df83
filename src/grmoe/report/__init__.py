"""`grmoe report`: models as one HTML page with curves, frontiers, experts and text, and a dial that moves.

`facts` and `sample` say what one model is and does, `content` puts that together, `page` writes the file. The page is
`page.html`, `page.css` and the scripts; `math.js` computes gates and bounds in the browser.
"""

from grmoe.report.content import Content, Note, Plan, collect
from grmoe.report.page import render
from grmoe.report.run import Report, default_path, run, save, show

__all__ = ["Content", "Note", "Plan", "Report", "collect", "default_path", "render", "run", "save", "show"]
