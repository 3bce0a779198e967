"""Private names of other libraries that the package uses, once each, under a public one.

A new version of a library may change such a name without a word. Then the entry here breaks, or its test in
``tests/unit/compat``, which says what the name is for; nothing else in the package has to be read to mend it.
``tests/unit/test_house.py`` refuses private names of these libraries anywhere else.
"""
