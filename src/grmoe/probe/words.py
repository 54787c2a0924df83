"""The types of tokens, and the 150 English function words of the paper's appendix "Token-Level Routing Details".

The appendix gives the number and four classes (determiners, prepositions, conjunctions, auxiliary verbs), but not the
words. These are common words of the four classes, and the personal pronouns, which would count as nouns otherwise.
"""

from __future__ import annotations

PUNCTUATION, FUNCTION, CODE, NUMBER, PROPER, COMMON, OTHER = range(7)
TYPES = ("punctuation", "function word", "code", "number/math", "proper noun", "common noun", "other")

DETERMINERS = """
    a an the this that these those each every either neither some any no all both many much few more most
    several such another other which what whose
"""
PRONOUNS = """
    i me my mine myself you your yours he him his himself she her hers it its itself we us our ours they them their
    theirs themselves who whom
"""
PREPOSITIONS = """
    about above across after against along among around as at before behind below between beyond
    by down during except for from in inside into near of off on onto out outside over past per since through
    throughout to toward towards under until up upon via with within without
"""
CONJUNCTIONS = """
    and or but nor yet so if then than because although though unless while whereas whether when where why how not
"""
AUXILIARIES = """
    am is are was were be been being have has had having do does did can could may might must shall should will would
"""

FUNCTION_WORDS = frozenset(f"{DETERMINERS} {PRONOUNS} {PREPOSITIONS} {CONJUNCTIONS} {AUXILIARIES}".split())
