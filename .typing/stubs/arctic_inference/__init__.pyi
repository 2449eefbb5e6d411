# Arctic need not be installed: all of it is Any to checkers.
