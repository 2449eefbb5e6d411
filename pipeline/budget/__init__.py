"""How much a run drafts: what a step costs on this machine, what drafts gain, and the choice by both."""
