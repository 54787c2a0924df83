"""The paper's synthetic routing study (`grmoe synthetic`)."""
