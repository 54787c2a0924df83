"""One module or package for each table or figure of the paper."""
