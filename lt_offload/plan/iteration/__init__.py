"""One iteration before it is a plan: what is decided, which computations run, how much memory they take."""
