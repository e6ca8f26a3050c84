// A tool loop of the AI SDK with the server at the address given, over the API given. Prints what the model said last, or the library's error.
import { readFileSync } from "node:fs";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

const [url, api] = process.argv.slice(2);
const options = { baseURL: `${url}/v1`, apiKey: "x" };
const model = {
  chat: () => createOpenAI(options).chat("fake"),
  compatible: () => createOpenAICompatible({ ...options, name: "mtpserve", includeUsage: true })("fake"),
  responses: () => createOpenAI(options)("fake"),
  messages: () => createAnthropic(options)("fake"),
}[api]();
const tools = {
  shell: tool({ description: "Runs it", inputSchema: z.object({ command: z.string() }), execute: async () => "hello-42" }),
  picture: tool({
    description: "Shows it",
    inputSchema: z.object({}),
    execute: async () => readFileSync("red.png").toString("base64"),
    toModelOutput: ({ output }) => ({ type: "content", value: [{ type: "image-data", data: output, mediaType: "image/png" }] }),
  }),
};
const asked = { model, tools, prompt: "Say hello with the shell, then look at the picture.", stopWhen: stepCountIs(8), maxOutputTokens: 4096 };
if (process.argv[4] === "stream") {
  const answer = streamText({ ...asked, onError: () => {} });
  console.log(await answer.text, await answer.finishReason);
} else {
  const answer = await generateText(asked);
  console.log(answer.text, answer.finishReason);
}
