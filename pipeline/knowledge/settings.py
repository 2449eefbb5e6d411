"""Settings of prompts: which templates, and how long a prompt may be. Knows no templates' contents."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from laserbatch.pipeline.sides import Side


class KnowledgeSettings(BaseModel):
    """What is asked about users and items."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    user_template: str = Field("kar_user", description="Prompt template for users.")
    item_template: str = Field("kar_item", description="Prompt template for items.")
    template_dir: Path | None = Field(
        None, description="A folder of your own templates; looked in before those that ship."
    )
    max_prompt_tokens: int = Field(
        1024,
        ge=16,
        description="Longer histories are cut from their oldest side; what still does not fit is quarantined.",
    )

    def template_of(self, side: Side) -> str:
        """Name of a side's template."""
        return self.user_template if side == "user" else self.item_template
