// Says how a form that the module sent has ended. After a redirect the module opens the next page by itself.
const MEANINGS = {
  "in-flight": "The payment still runs. Press the button again to see its result.",
  "outcome-unknown": "No reply came. Press the button again: you pay once.",
  unsettled: "An earlier payment has no reply yet. Choose the same item and press the button again.",
  refused: "Nothing was paid. Press the button again.",
  done: "It was paid. See the list after a reload.",
};

document.getElementById("sent").addEventListener("idempotency", ({ detail: { response, error } }) => {
  const message = document.getElementById("message");
  if (error) message.textContent = MEANINGS[error.kind] ?? "The payment could not be sent.";
  else if (!response.ok) message.textContent = "The shop refused the payment.";
});
