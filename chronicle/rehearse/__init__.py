"""Rehearse: a script is run twice to step 2k, once undisturbed and once killed at k and resumed, and the two are compared.

    launches    one launch in a scratch directory, how it is ended
    leaves      every value in the files of a checkpoint, by name
    judge       what differs, and what two undisturbed launches differ in anyway
    rehearse    the four launches, one after the other, and the answer
    told        the answer as a page, as JSON and as an entry of the journal
"""
