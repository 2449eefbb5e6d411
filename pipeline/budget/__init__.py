"""The draft budget of a run: the cost of a step on this machine, the gain of drafts, and the choice by both."""
