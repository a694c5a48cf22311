"""Public training scripts, killed and resumed: which of them are the same run afterwards?"""
