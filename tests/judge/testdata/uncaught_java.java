public class Main {
  public static void main(String[] args) {
    Object o = null;
    o.toString();
  }
}
